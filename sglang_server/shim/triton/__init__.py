"""Inert stand-in for Triton: lets modules that define @triton.jit kernels be imported on a
machine where no kernel is ever launched.  Calling a kernel raises."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "3.6.0"
__path__ = []


class _Base:
    def __init__(self, *a, **k):
        pass

    def __init_subclass__(cls, **k):
        super().__init_subclass__()


class _Kernel:
    def __init__(self, fn):
        self.fn, self.__name__, self.__doc__, self.__module__ = (
            fn,
            getattr(fn, "__name__", "kernel"),
            None,
            getattr(fn, "__module__", None),
        )
        self.arg_names = []

    def __getitem__(self, grid):
        raise RuntimeError(f"triton stub: kernel {self.__name__} launched")

    def __call__(self, *a, **k):
        raise RuntimeError(f"triton stub: kernel {self.__name__} called")


def jit(fn=None, **kw):
    return _Kernel(fn) if callable(fn) else _Kernel


def _deco(*a, **k):
    if len(a) == 1 and not k and (callable(a[0]) or isinstance(a[0], _Kernel)):
        return a[0]
    return lambda fn: fn


autotune = heuristics = _deco


class Config(_Base):
    def __init__(self, kwargs=None, num_warps=4, num_stages=2, **extra):
        self.kwargs, self.num_warps, self.num_stages = kwargs or {}, num_warps, num_stages


def cdiv(a, b):
    return -(a // -b)


def next_power_of_2(n):
    return 1 << (n - 1).bit_length() if n > 0 else 1


def _stub_class(name, mod):
    base = Exception if name.endswith(("Error", "OutOfResources")) else _Base
    return type(name, (base,), {"__module__": mod})


class _Mod(types.ModuleType):
    """Every attribute is a class (Capitalised), or a callable submodule."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        v = _stub_class(name, self.__name__) if name[:1].isupper() else importlib.import_module(full)
        setattr(self, name, v)
        return v

    def __call__(self, *a, **k):
        return _deco(*a, **k)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("triton."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Mod(spec.name)

    def exec_module(self, m):
        m.__path__ = []
        if m.__name__ == "triton.language":
            m.constexpr = type("constexpr", (), {"__init__": lambda s, v=None: setattr(s, "value", v)})
            m.dtype = type("dtype", (), {})


sys.meta_path.append(_Finder())
import triton.language  # noqa: E402, F401
import triton.runtime  # noqa: E402, F401


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    if name[:1].isupper():
        return _stub_class(name, "triton")
    return importlib.import_module("triton." + name)
