"""The two programs of the reward `code` for tests that are statements, each in a sandbox (`actors.rewards.code`).

`serve` runs what the student wrote and calls it when asked. `judge` runs the statements; a name that they do not define
is one of the program's, and its calls go over a pipe. Only plain data comes back (numbers, texts, lists, dicts ...), so
nothing of the student's runs where it is judged, and the program never sees what is expected of it.

Objects stay with the program. They are of use only where the statements name a class (`Stack()`, by its capital): their
methods are then called there. This file is run as text in another interpreter: it imports nothing of ours and needs
Python 3.9 and no more."""

# ruff: noqa: B905 - Python 3.9
from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import sys
from typing import Any

READS, WRITES = 3, 4
"""File descriptors of the pipes."""
MAX_LINE = 16 << 20
"""Bytes of one message."""
MAX_ITEMS = 1 << 20
"""Items of an iterator that are read."""
OF_OBJECTS: Any = {"length": len, "truth": bool, "text": str, "items": list}
UNJUDGEABLE = 2
"""Exit code of `judge`: the statements compare two objects of the program's, or are no Python."""
SCALARS = (type(None), bool, int, float, str)
BASES: Any = (bool, int, float, str, bytes, tuple, list, dict, set, frozenset, complex)


class Unjudgeable(BaseException):
    """What is compared is no data."""


class Ended(BaseException):
    """The other side is gone, or says no JSON."""


class PipeLink:
    """Sends and reads messages, one line of JSON each; keeps the objects that only have a number on the other side."""

    def __init__(self, *, judging: bool = False) -> None:
        """`judging`: the other side is the program, which may call what the statements hand it and read the attributes
        of objects of their own classes, and nothing else here."""
        getattr(sys, "set_int_max_str_digits", int)(0)  # numbers may be long; messages are bounded
        self.judging = judging
        self.kept: list[Any] = []
        self._left = b""

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(WRITES, data) :]

    def receive(self) -> Any:
        while b"\n" not in self._left:
            read = os.read(READS, 1 << 20)
            if not read or len(self._left) > MAX_LINE:
                raise Ended("the other side is gone, or sends too much")
            self._left += read
        line, _, self._left = self._left.partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Ended(str(error)) from None

    def encode(self, value: Any) -> Any:
        """Exact and derived plain types by their contents; iterators by their items; all else stays here."""
        if type(value) in SCALARS:
            return value
        base: Any = next((base for base in BASES if isinstance(value, base)), None)
        if base is not None and base.__name__ in ("int", "float", "str"):  # a bool is none other than itself
            return base.__add__(value, base())
        if base in (tuple, list, set, frozenset):
            return {base.__name__: [self.encode(one) for one in base.__iter__(value)]}
        if base is dict:
            return {"dict": [[self.encode(k), self.encode(v)] for k, v in dict.items(value)]}
        if base is bytes:
            return {"bytes": list(bytes.__iter__(value))}
        if base is complex:
            return {"complex": [value.real, value.imag]}
        if isinstance(value, range):
            return {"range": [value.start, value.stop, value.step]}
        if hasattr(type(value), "__next__"):
            return {"iterator": [self.encode(one) for _, one in zip(range(MAX_ITEMS), value)]}
        if isinstance(value, Remote):
            return {"back": value.number}
        self.kept.append(value)
        kinds = {"function": "function", "method": "function"}
        return {kinds.get(type(value).__name__, "object"): len(self.kept) - 1}

    def decode(self, value: Any, keep: bool = True) -> Any:
        """`keep`: objects of the other side may be used."""
        if not isinstance(value, dict):
            return value
        ((kind, body),) = value.items()
        if kind == "dict":
            return {self.decode(k, keep): self.decode(v, keep) for k, v in body}
        if kind in ("bytes", "range", "complex"):
            return bytes(body) if kind == "bytes" else {"range": range, "complex": complex}[kind](*body)
        if kind == "back":
            return self.kept[body]
        if kind in ("function", "object"):
            return (Object if keep and kind == "object" else Function)(self, body, keep)
        items = [self.decode(one, keep) for one in body]
        makes: Any = {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset, "iterator": iter}
        return makes[kind](items)

    def ask(self, keep: bool, *request: Any) -> Any:
        """The answer to a request; the other side may ask meanwhile."""
        self.send(["ask", *request])
        while True:
            kind, *said = self.receive()
            if kind == "ask":
                self.answer(said)
                continue
            if kind == "raised":
                found: Any = vars(builtins).get(str(said[0]), RuntimeError)
                if not (isinstance(found, type) and issubclass(found, Exception)):
                    found = RuntimeError
                raise found(str(said[1])[:1000])
            return self.decode(said[0], keep), said[1]

    def answer(self, request: Any) -> None:
        """Carry out what the other side asks for."""
        name, number, argument, named = request
        try:
            target = self.kept[number]
            given = self.decode(argument)
            own = type(target).__module__ == "tests" and name == "attribute" and not str(given).startswith("_")
            if self.judging and name != "call" and not own:
                raise AttributeError(f"{name} {given!r:.80}: not for the program")
            if name == "call":
                result = target(*given, **self.decode(named))
            elif name == "attribute":
                result = getattr(target, given)
            elif name == "item":
                result = target[given]
            else:
                result = OF_OBJECTS[name](target)
            self.send(["is", self.encode(result), self.encode(given) if name == "call" and result is None else None])
        except Exception as error:
            self.send(["raised", type(error).__name__, str(error)[:1000]])


class Remote:
    """Something of the other side's. It equals nothing but itself, whatever its own `__eq__` says."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, link: PipeLink, number: int, keep: bool) -> None:
        self.link, self.number, self.keep = link, number, keep

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote) and self.keep and self.number != other.number:
            raise Unjudgeable
        return isinstance(other, Remote) and self.number == other.number


class Function(Remote):
    """Can be called, and no more."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """A call that returns None may have changed its arguments: lists, dicts and sets then change here too."""
        encode = self.link.encode
        result, after = self.link.ask(self.keep, "call", self.number, encode(list(arguments)), encode(named))
        for before, now in zip(arguments, self.link.decode(after, self.keep) or ()):
            if type(before) is type(now) and isinstance(before, (list, dict, set)):
                before.clear()
                (before.extend if isinstance(before, list) else before.update)(now)
        return result


class Object(Function):
    """One of a class that the statements name. Neither its comparisons nor its arithmetic are asked for."""

    def _asked(self, what: str, argument: Any = None) -> Any:
        return self.link.ask(self.keep, what, self.number, self.link.encode(argument), {"dict": []})[0]

    def __getattr__(self, name: str) -> Any:
        found = self._asked("attribute", name)
        return Object(self.link, found.number, self.keep) if isinstance(found, Function) else found

    def __len__(self) -> int:
        return self._asked("length")

    def __bool__(self) -> bool:
        return bool(self._asked("truth"))

    def __str__(self) -> str:
        return str(self._asked("text"))

    def __getitem__(self, at: Any) -> Any:
        return self._asked("item", at)

    def __iter__(self) -> Any:
        return iter(self._asked("items"))


def serve() -> None:
    """Run the program that is on standard input, and then what is asked for."""
    link = PipeLink()
    module = type(sys)("__main__")
    program = sys.stdin.read()
    sys.modules["__main__"] = module
    exec(compile(program, "program.py", "exec"), module.__dict__)
    names = [name for name in module.__dict__ if not name.startswith("__")]
    link.kept += [module.__dict__[name] for name in names]
    try:
        link.send(names)
        while True:
            link.answer(link.receive()[1:])
    except (Ended, BrokenPipeError):
        os._exit(0)


def judge() -> None:
    """Run the statements that are on standard input. Exit code 0: they hold; 1: they do not; UNJUDGEABLE."""
    link = PipeLink(judging=True)
    statements = sys.stdin.read()
    try:
        tree = ast.parse(statements)
        wanted = names_of_program(tree)
        defined: Any = link.receive()
        if not wanted - set(dir(builtins)):  # else a name of Python's own is Python's: `len` counts honestly
            wanted &= set(defined)
        else:
            wanted -= set(dir(builtins))
        known: Any = {name: number for number, name in enumerate(defined)}
        modules = modules_of(tree, wanted)
        mine = [name for name in wanted if name in known and name not in modules]
        names = {name: Function(link, known[name], name[:1].isupper()) for name in mine}
        exec(compile(tree, "tests", "exec"), {"__name__": "tests", **modules, **names})
    except (Unjudgeable, SyntaxError):
        os._exit(UNJUDGEABLE)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace")[:1000])
        os._exit(1)
    os._exit(0)


def names_of_program(tree: ast.AST) -> set[str]:
    """Names that the statements use and do not define."""
    nodes = list(ast.walk(tree))
    bound = {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    bound |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    bound |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    return {node.id for node in nodes if isinstance(node, ast.Name)} - bound


def modules_of(tree: ast.AST, wanted: set[str]) -> dict[str, Any]:
    """Modules of Python's library that the statements use as such without an import, as `math.isclose(...)`: they come
    from here and not from the program."""
    nodes = list(ast.walk(tree))
    of_attributes = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    bare = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in of_attributes}
    names = (wanted - bare) & set(getattr(sys, "stdlib_module_names", ("math",)))
    return {name: importlib.import_module(name) for name in names}
