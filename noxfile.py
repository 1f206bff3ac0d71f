"""The test suite on every supported torch: `make test-matrix`, or `nox -s "tests(torch='2.11.0')"` for one.
Called by nox; calls pytest in a virtual environment of its own per version.
"""

import nox

TORCH = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True


@nox.session
@nox.parametrize("torch", TORCH)
def tests(session: nox.Session, torch: str) -> None:
    session.install(f"torch=={torch}", "setuptools")
    session.install("--editable", ".[test]")
    session.run("pytest", "-m", "not gpu", *session.posargs)
