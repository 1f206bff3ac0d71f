"""`fresh_python`: runs code in an interpreter that has imported torch, or other modules, and nothing else.
Called by tests of imports; calls os.fork in a template process, which imports the modules once for all of them.
"""

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

_TEMPLATE = """
import importlib, json, os, sys, traceback, types
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    code, environment, out, err = json.loads(line)
    child = os.fork()
    if not child:
        status = 1
        try:
            for path, stream in ((os.devnull, 0), (out, 1), (err, 2)):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), stream)
            os.environ.update(environment)
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(code, vars(sys.modules["__main__"]))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

# What transformers imports of other packages, in three seconds: a process that has them imports it in one.
OF_TRANSFORMERS = ("torch", "torch._dynamo", "torch.distributed.tensor", "torchao.quantization")


def fresh_python(code: str, imported: tuple[str, ...] = ("torch",), **environment: str) -> str:
    """Runs code as a main module and returns what it prints.

    Args:
        code: the source. It can see the modules of `imported` in sys.modules and has to import them by name.
        imported: the modules that are there already. Starting torch takes a second, a fork of it some milliseconds.
        environment: variables that are set before the code runs, but after `imported` was.

    Raises:
        AssertionError: the code raised an exception; the message is its traceback.
    """
    template = _template(imported)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        template.stdin.write(json.dumps([code, environment, str(out), str(err)]) + "\n")
        template.stdin.flush()
        status = template.stdout.readline().strip()
        assert status == "0", f"status {status}\n{err.read_text()}"
        return out.read_text()


@functools.cache
def _template(imported: tuple[str, ...]) -> subprocess.Popen:
    """A process that ends with this one, whose end closes its standard input."""
    command = [sys.executable, "-W", "ignore", "-c", _TEMPLATE, *imported]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
