"""The GitHub workflow calls what .ci/run calls, and both call targets of the Makefile; actions are pinned.
Called by pytest; reads .github/workflows/ci.yml, .ci/run and the Makefile.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
LOCAL = set(re.findall(r"^ *(?:nice )?make ([\w-]+)(?:\s|$)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_workflow_calls_every_target_that_ci_calls():
    called = set(re.findall(r"target: ([\w-]+)", WORKFLOW)) | set(re.findall(r"run: make ([\w-]+)", WORKFLOW))
    assert {"test-all", "lint", "docs", "test-nvfuser"} <= LOCAL <= called <= TARGETS


def test_actions_are_pinned_to_a_version():
    actions = re.findall(r"uses: (\S+)", WORKFLOW)
    assert len(actions) == 6
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", action) for action in actions)
