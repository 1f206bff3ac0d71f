"""Takes out of a process what makes up most of the compilers' time in tests, and what no result depends on.
Called by tests/conftest.py before each fixture and, in the processes of a group, by tests/processes.py; patches the
interpreter's `dis`, torch._dynamo and Thunder.
"""

import dis
import functools
import gc
import inspect
import sys
import types


def hide_from_collector() -> None:
    """Hides all objects from the garbage collector; from now on `collect_if_many` alone starts full collections.

    They took half of the time of the compilers' tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 1_000_000)


def collect_if_many() -> None:
    """Collects behind a test that has made many objects, and hides those that are left: caches of torch and Thunder."""
    if gc.get_count()[2] >= 20:
        gc.collect()
        gc.freeze()


def speed_up_compilers() -> None:
    """Patches the compilers that are imported, once; a later call patches those that were imported since."""
    _instructions_are_kept()
    if (guards := sys.modules.get("torch._dynamo.guards")) is not None:
        # torch._dynamo times the guards of each graph behind a flush of the CPU's caches: 65 ms, for its log alone.
        guards.profile_guard_manager = lambda *_: 0.0
    if (interpreter := sys.modules.get("thunder.core.interpreter")) is not None:
        _globals_are_subscripted(interpreter)
        _callers_are_not_read(interpreter)
        _frames_are_kept(interpreter.InterpreterFrame)


@functools.cache
def _instructions_are_kept() -> None:
    """Thunder disassembles a function at each call of it."""
    get_instructions = dis.get_instructions

    @functools.lru_cache(10_000)
    def instructions(code, **options):
        return tuple(get_instructions(code, **options))

    dis.get_instructions = lambda code, **options: iter(instructions(code, **options))


@functools.cache
def _globals_are_subscripted(interpreter) -> None:
    """Thunder looks up a global by interpreting `lambda d, k: d[k]` and, in it, `obj.__getitem__(index)`: half of its
    time. Both end in the call of `dict.__getitem__` that is made here."""
    lookup, call, unwrap = interpreter.globals_lookup, interpreter._interpret_call, interpreter.unwrap

    def subscript(names, name):
        names_, name_ = unwrap(names), unwrap(name)
        return call(dict.__getitem__, names, name) if type(names_) is dict and name_ in names_ else None

    def globals_lookup(globals_dict, name):
        found = subscript(globals_dict, name)
        if found is None:
            builtins = subscript(globals_dict, interpreter.wrap_const("__builtins__"))
            found = None if builtins is None else subscript(builtins, name)
        return lookup(globals_dict, name) if found is None else found

    interpreter.globals_lookup = globals_lookup


@functools.cache
def _frames_are_kept(frame_class) -> None:
    """Thunder starts a thread and waits for it to make the Python frame of each line that a traceback may name."""
    make, frames = frame_class.get_or_make_python_frame, {}

    def python_frame(self):
        key = self.code, self.qualname, self.positions and self.positions.lineno
        return frames.get(key) or frames.setdefault(key, make(self))

    frame_class.get_or_make_python_frame = python_frame


@functools.cache
def _callers_are_not_read(interpreter) -> None:
    """Thunder reads the source of each caller up to pytest's to know one of them: an eighth of thunderfx's time."""

    def stack():
        frame = sys._getframe(3)
        info = inspect.getframeinfo(frame)
        positions = {"positions": info.positions} if hasattr(info, "positions") else {}  # Python 3.11 has them
        return None, None, inspect.FrameInfo(frame, *info, **positions)

    interpreter.inspect = types.SimpleNamespace(**{**vars(inspect), "stack": stack})
