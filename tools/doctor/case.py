"""The run that is examined, and what several checks need of it, each made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast

from stillhouse.launch.checks import preflight
from stillhouse.launch.checks.finding import Case, Impossible
from stillhouse.launch.config.command_line import CommandLine, resolve_config
from stillhouse.launch.config.pools import TeacherPool, teacher_pools
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError, LaunchError
from stillhouse.launch.resume import check_resumed
from stillhouse.launch.runfolder import choose_path, expect_usable

T = TypeVar("T")


class _Outcome(NamedTuple):
    value: object
    error: str


class ModelCase(Case):
    """One run before its start, with what checks of models share. Used by one thread."""

    def __init__(
        self,
        config: RunConfig,
        run_path: Path,
        scratch: Path,
        checked: preflight.Checked | None,
        mistakes: tuple[str, ...] = (),
    ) -> None:
        """`scratch`: a folder that is deleted afterwards."""
        super().__init__(config, run_path, checked, mistakes)
        self.scratch: Final = scratch
        self._made: dict[str, _Outcome] = {}
        self._closers: list[Callable[[], None]] = []

    @classmethod
    def of(cls, line: CommandLine, scratch: Path) -> ModelCase:
        """The run of this command line. Raises LaunchError when it cannot even be read."""
        config = resolve_config(line)
        run_path = choose_path(line.run_dir, resume=line.resume, name=line.name)
        try:
            checked = preflight.check(config)
            preflight.check_recorded(checked.config, resume=line.resume)
        except ConfigError as error:
            found, _ = preflight.find_models(config)
            return cls(preflight.with_folders(config, found), run_path, scratch, None, error.mistakes)
        try:
            expect_usable(run_path, resume=line.resume)
            if line.resume:
                check_resumed(checked.config, run_path, read_prompts=True)
        except LaunchError as error:
            return cls(checked.config, run_path, scratch, checked, tuple(str(error).splitlines()))
        return cls(checked.config, run_path, scratch, checked)

    @property
    def pools(self) -> tuple[TeacherPool, ...]:
        """Raises Impossible for a run without teachers."""
        pools = tuple(pool for pool in teacher_pools(self.config) if not pool.config.teacher.api.url)
        if not pools and teacher_pools(self.config):
            raise Impossible("an API has no weights here; it is probed when its teacher starts")
        if not pools:
            raise Impossible("no teacher scores anything in this run (teachers = 0)")
        return pools

    def once(self, what: str, make: Callable[[], T]) -> T:
        """The result of `make`, which is called for the first of all that ask for `what`. If that failed, the others
        get Impossible."""
        former = self._made.get(what)
        if former is None:
            try:
                value = make()
            except Exception as error:
                reason = str(error) if isinstance(error, Impossible) else f"{what} failed, see above"
                self._made[what] = _Outcome(None, reason)
                raise
            self._made[what] = _Outcome(value, "")
            return value
        if former.error:
            raise Impossible(former.error)
        return cast(Any, former.value)

    def at_end(self, close: Callable[[], None]) -> None:
        """Call this when all checks are made."""
        self._closers.append(close)

    def close(self) -> None:
        while self._closers:
            self._closers.pop()()
