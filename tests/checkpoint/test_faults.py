"""Conversions and saves that fail or stop: broken headers and indices, a full disk, kills, two at a time, a device that
is not there. Each is one line that names the file and the tensor, a status other than 0, and no folder that looks
finished.
Called by pytest.
"""

import errno
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import sys

import pytest
import torch
from checkpoint_files import copy_export, edit_json, files_of, plain_source
from processes import CALL, FORKS
from safetensors.torch import save_file

from thunder_moe.__main__ import main
from thunder_moe.checkpoint import Checkpoint, convert, partial, write_checkpoint

PATH = "model.layers.0.mlp.experts"
SHARD = "model-00001-of-00002.safetensors"


LIKE_CONVERT = ("--quiet", "--scale-search", "none")  # the function's defaults


def run(tmp_path, *options, before=("nothing",), file_limit=None):
    """(status, what it said) of the command line in a process of its own; -n: signal n ended it.

    Args:
        tmp_path: directory of source and destination.
        *options: of the command line.
        before: name of a function of this module that is called first, and its arguments.
        file_limit: bytes that a file may have there.
    """
    arguments = ["convert", str(tmp_path / "source"), str(tmp_path / "out"), *LIKE_CONVERT, *options]
    # A fork of a server that has imported everything and run nothing: safetensors' threads do not survive a fork.
    process = FORKS.Process(target=_run, args=(arguments, before, file_limit, tmp_path / "stderr"))
    process.start()
    process.join(CALL)  # the first one waits for the server's imports
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"no end in {CALL} s")
    said = (tmp_path / "stderr").read_text().strip()
    (tmp_path / "stderr").unlink()
    return process.exitcode, said


def _run(arguments, before, file_limit, stderr):
    sys.stderr = stderr.open("w", buffering=1)
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    name, *others = before
    globals()[name](*others)
    sys.exit(main(arguments))


def nothing():
    pass


def die_of_large_files():
    """The kernel ends a process that writes beyond its limit, which Python prevents."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def kill_at(call, moment):
    """The n-th call of a function of os ends the process."""
    calls, original = [], getattr(os, call)

    def stop(*args):
        calls.append(args)
        if len(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(os, call, stop)


@pytest.fixture
def source(tmp_path):
    plain_source(tmp_path / "source")
    return tmp_path / "source"


def command(tmp_path, capsys, *options):
    """(status, the one line that was said) of the command line in this process."""
    status = main(["convert", str(tmp_path / "source"), str(tmp_path / "out"), *LIKE_CONVERT, *options])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (status != 0)
    return status, "".join(lines)


def header_of(file):
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_header(file, text, data):
    text = text if isinstance(text, bytes) else text.encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def first_tensor(header):
    return next(name for name in header if name != "__metadata__")


HEADERS = {
    "no object": lambda h, n: [1],
    "entry null": lambda h, n: h | {n: None},
    "shape null": lambda h, n: h | {n: h[n] | {"shape": None}},
    "another size": lambda h, n: h | {n: h[n] | {"shape": [1, 1]}},
    "offsets backwards": lambda h, n: h | {n: h[n] | {"data_offsets": [9, 1]}},
    "unknown dtype": lambda h, n: h | {n: h[n] | {"dtype": "Q7"}},
    "a gap": lambda h, n: {k: v for k, v in h.items() if k != n},
    "overlap": lambda h, n: h | {"other": h[n]},
    "deep": lambda h, n: b"[" * 200_000,
    "no text": lambda h, n: b"\xff\xfe{",
    "huge number": lambda h, n: b'{"a": {"dtype": "U8", "shape": [' + b"9" * 5000 + b"]}}",
}


@pytest.mark.parametrize("edit", HEADERS.values(), ids=HEADERS)
def test_broken_headers(tmp_path, source, capsys, edit):
    file = source / SHARD
    header, data = header_of(file)
    name = first_tensor(header)
    header = edit(header, name)
    write_header(file, header if isinstance(header, bytes) else json.dumps(header), data)
    status, said = command(tmp_path, capsys)
    assert status == 1
    assert said.startswith(f"error: {file}: is truncated or no safetensors file (Error while deserializing header: ")
    assert os.listdir(tmp_path) == ["source"]


def test_a_tensor_twice_in_a_header(tmp_path, source, capsys):
    header, data = header_of(source / SHARD)
    name = first_tensor(header)
    text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
    write_header(source / SHARD, text, data)
    assert command(tmp_path, capsys) == (1, f"error: {source / SHARD}: {name!r} is twice in the header, wanted once")


def test_a_header_that_is_too_long(tmp_path, source, capsys):
    with (source / SHARD).open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)  # a hole, which takes no space
    status, said = command(tmp_path, capsys)
    assert status == 1
    assert re.search(rf"{SHARD}: is truncated or no safetensors file \(.*header too large", said)


INDICES = {
    "null": (None, "names None for tensor '{n}', wanted the name of a file"),
    "a number": (3, "names 3 for tensor '{n}', wanted the name of a file"),
    "empty": ("", "names '' for tensor '{n}', wanted the name of a file"),
    "upwards": ("../outside.safetensors", "names '../outside.safetensors' for tensor '{n}', wanted a file inside"),
    "hidden upwards": ("a/../../outside.safetensors", "wanted a file inside"),
    "absolute": ("{tmp}/outside.safetensors", "wanted a file inside"),
    "Windows": ("..\\outside.safetensors", "wanted a file inside"),
    "a drive": ("C:\\outside.safetensors", "wanted a file inside"),
    "missing": ("model-9.safetensors", "names model-9.safetensors for tensor '{n}', which is not there"),
}


@pytest.mark.parametrize(("value", "message"), INDICES.values(), ids=INDICES)
def test_broken_indices(tmp_path, source, capsys, value, message):
    name = f"{PATH}.0.up_proj.weight"
    save_file({name: torch.zeros(48, 32)}, tmp_path / "outside.safetensors")
    value = value.replace("{tmp}", str(tmp_path)) if isinstance(value, str) else value
    edit_json(source / "model.safetensors.index.json", lambda index: index["weight_map"].update({name: value}))
    status, said = command(tmp_path, capsys)
    assert status == 1
    assert said.startswith(f"error: {source / 'model.safetensors.index.json'}: ")
    assert message.replace("{n}", name) in said
    assert sorted(os.listdir(tmp_path)) == ["outside.safetensors", "source"]


def test_indices_of_load_checkpoint(tmp_path):
    load_checkpoint = pytest.importorskip("thunder_moe.integrations.huggingface.checkpoint").load_checkpoint
    copy = copy_export(tmp_path, "compressed_tensors_qwen3_moe")
    (copy / SHARD).rename(tmp_path / SHARD)

    def outside(index):
        index["weight_map"] = {
            name: f"../{file}" if file == SHARD else file for name, file in index["weight_map"].items()
        }

    edit_json(copy / "model.safetensors.index.json", outside)
    with pytest.raises(ValueError, match=rf"names '../{SHARD}' for tensor '.*', wanted a file inside"):
        load_checkpoint(copy)


def test_load_checkpoint_of_an_index_without_metadata(tmp_path):
    load_checkpoint = pytest.importorskip("thunder_moe.integrations.huggingface.checkpoint").load_checkpoint
    copy = copy_export(tmp_path, "compressed_tensors_qwen3_moe")
    index = copy / "model.safetensors.index.json"
    edit_json(index, lambda content: content.pop("metadata"))
    with pytest.raises(ValueError, match=rf"{index}: got no 'metadata', wanted a JSON object"):
        load_checkpoint(copy)


@pytest.mark.parametrize("argument", ["source", "destination"])
def test_a_home_that_nobody_has(tmp_path, source, capsys, argument):
    paths = {"source": str(source), "destination": str(tmp_path / "out")} | {argument: "~nobody-of-this-name/x"}
    assert main(["convert", *paths.values(), "--quiet"]) == 1
    assert capsys.readouterr().err == (
        f"error: {argument}: got '~nobody-of-this-name/x', wanted the name of a user with a home directory\n"
    )
    assert os.listdir(tmp_path) == ["source"]


def test_links_are_followed(tmp_path, source):
    """As in the hub's cache, whose snapshots are links to files elsewhere."""
    convert(source, tmp_path / "one")
    (tmp_path / "blobs").mkdir()
    for file in list(source.iterdir()):
        file.rename(tmp_path / "blobs" / file.name)
        file.symlink_to(tmp_path / "blobs" / file.name)
    convert(source, tmp_path / "two")
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert not any(path.is_symlink() for path in (tmp_path / "two").iterdir())


NULLS = [
    ("config.json", {"quantization_config": 3}, "quantization_config: got 3, wanted a JSON object"),
    ("config.json", {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": []}},
     r"config_groups: got \[\], wanted a JSON object"),
    ("config.json", {"text_config": "x"}, "text_config: got 'x', wanted a JSON object"),
    ("config.json", {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fmt: got 'e5m2', wanted 'e4m3'"),
    ("config.json", {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
     "config_groups": {"a": {}}, "transform_config": {"config_groups": {"r": {"apply": ["input"]}}}}},
     "transform_config: got 'r' at 'input', wanted none that the model would have to compute"),
    ("hf_quant_config.json", {"quantization": [1]}, r"quantization: got \[1\], wanted a JSON object"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "value", "message"), NULLS)
def test_broken_configs(tmp_path, source, file, value, message):
    (source / file).write_text(json.dumps(value))
    with pytest.raises(ValueError, match=f"^{source / file}: {message}"):
        convert(source, tmp_path / "out")


def test_nulls_in_configs_are_nothing(tmp_path, source):
    convert(source, tmp_path / "one")
    nothing = {"quantization_config": None, "text_config": None, "model_type": None}
    edit_json(source / "config.json", lambda config: config.update(nothing))
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": None}))
    with pytest.raises(ValueError, match="hf_quant_config.json: quant_algo: got None"):
        convert(source, tmp_path / "two")
    (source / "hf_quant_config.json").unlink()
    convert(source, tmp_path / "two")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()


def test_devices_that_are_not_there(tmp_path, source, capsys):
    for device in ("meta", *([] if torch.cuda.is_available() else ["cuda", "cuda:7"])):
        status, said = command(tmp_path, capsys, "--device", device)
        assert status == 1
        assert said.startswith(f"error: device: got {device!r}, which cannot be used here (")
    assert os.listdir(tmp_path) == ["source"]


def test_a_device_without_memory(tmp_path, source, capsys, monkeypatch):
    quantize = "thunder_moe.checkpoint.quantize.quantize_tensor"

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(quantize, full)
        status, said = command(tmp_path, capsys)
    assert (status, said) == (1, f"error: {source}: {PATH} does not fit the device cpu (CUDA out of memory.)")
    with monkeypatch.context() as patch:
        patch.setattr(quantize, lambda *args, **kwargs: torch.empty(1 << 50))
        status, said = command(tmp_path, capsys)
    assert status == 1
    assert said.startswith(f"error: {source}: {PATH} does not fit the device cpu (")
    assert command(tmp_path, capsys) == (0, "")


FULL = "File too large"  # what a limit of file sizes says, where a full disk says "No space left on device"


def test_a_full_disk(tmp_path, source):
    convert(source, tmp_path / "whole")
    status, said = run(tmp_path, file_limit=5_000)
    assert status == 1
    assert said.startswith(f"error: {tmp_path}/out.partial/checkpoint/part-00000")
    assert FULL in said
    assert "\n" not in said
    assert not (tmp_path / "out").exists()
    status, said = run(tmp_path, file_limit=300)  # not even the notes of progress fit
    assert status == 1
    assert said.startswith("error: ")
    assert f"{FULL}: '{tmp_path}/out.partial/progress.json.unfinished'" in said
    assert run(tmp_path) == (0, "")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_full_disk_at_another_file(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        with pytest.raises(OSError, match=rf"{FULL}: '.*/code.py"):
            write_checkpoint(tmp_path / "out", {}, [("a.weight", torch.zeros(3))], extra={"code.py": "#" * 200_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_at_a_copy(tmp_path, source, capsys):
    (source / "tokenizer.json").write_text(" " * 300_000)
    status, said = run(tmp_path, file_limit=200_000)
    assert status == 1
    assert FULL in said
    assert "checkpoint/tokenizer.json'" in said
    assert not (tmp_path / "out").exists()
    assert command(tmp_path, capsys) == (0, "")
    assert (tmp_path / "out" / "tokenizer.json").stat().st_size == 300_000


def test_killed_in_the_middle_of_a_shard(tmp_path, source):
    """The kernel ends the process inside safetensors' write, whose temporary file stays in the working directory."""
    convert(source, tmp_path / "whole")
    status, _ = run(tmp_path, before=("die_of_large_files",), file_limit=5_000)
    assert status == -signal.SIGXFSZ
    assert not (tmp_path / "out").exists()
    left = os.listdir(tmp_path / "out.partial" / "checkpoint")
    assert left
    assert not any(name.endswith(".safetensors") for name in left)
    assert run(tmp_path) == (0, "")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(("call", "moment"), [("replace", 1), ("replace", 3), ("replace", 8), ("rename", 1)])
def test_killed_between_files(tmp_path, source, call, moment):
    convert(source, tmp_path / "whole", max_shard_size="9KB")
    assert run(tmp_path, "--max-shard-size", "9KB", before=("kill_at", call, moment)) == (-signal.SIGKILL, "")
    assert not (tmp_path / "out").exists()
    errors = convert(source, tmp_path / "out", max_shard_size="9KB")
    assert [error.name for error in errors] == [PATH]
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def killed(path):
    """A save that ends in the middle, as by ``kill -9``."""

    def tensors():
        yield "a", torch.zeros(100)
        yield "b", torch.zeros(100)
        os.kill(os.getpid(), signal.SIGKILL)

    write_checkpoint(path, {}, tensors(), max_shard_size=100)


def test_the_next_save_removes_what_a_killed_one_left(tmp_path, caplog):
    process = FORKS.Process(target=killed, args=(tmp_path / "out",))
    process.start()
    process.join(CALL)
    assert process.exitcode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert list(left.glob("*.safetensors"))
    (tmp_path / ".out.mine").mkdir()
    write_checkpoint(tmp_path / "other", {}, [("a", torch.zeros(3))])
    assert left.exists()  # of a save to another place
    caplog.clear()
    write_checkpoint(tmp_path / "out", {}, [("a", torch.zeros(3))])
    assert [record.message.split(": ")[0] for record in caplog.records] == [str(left)]
    assert "GB that an interrupted save had left" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.mine", "other", "out"]


def test_a_file_system_without_locks(tmp_path, caplog, monkeypatch):
    """Nobody can tell a leftover from a save that is running there: it stays, which is said."""
    left = tmp_path / ".out.thunder_moe_save.x"
    left.mkdir()

    def flock(*args):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    write_checkpoint(tmp_path / "out", {}, [("a", torch.zeros(3))])
    assert caplog.messages == [f"{left}: left by another save; remove it if none is running (it cannot be locked)"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [left.name, "out"]


def test_what_is_in_the_way_of_unfinished_work(tmp_path, source, capsys):
    directory = tmp_path / "out.partial"
    (tmp_path / "elsewhere").mkdir()
    for make in (
        directory.touch,
        lambda: directory.symlink_to("nowhere"),
        lambda: directory.symlink_to(directory),
        lambda: directory.symlink_to(tmp_path / "elsewhere"),
    ):
        make()
        status, said = command(tmp_path, capsys)
        assert (status, said.split(",")[0]) == (1, f"error: destination: {directory} is a link or a file")
        directory.unlink()
    assert command(tmp_path, capsys) == (0, "")


def test_messages_name_the_argument(tmp_path, source, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    wanted = {"nowhere": "is not a directory", "file": "is a file, wanted", "empty": "has no config.json"}
    for name, words in wanted.items():
        assert main(["convert", str(tmp_path / name), str(tmp_path / "out")]) == 1
        assert f"error: source: {tmp_path / name} {words}" in capsys.readouterr().err
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert main(["convert", str(tmp_path / "empty"), str(tmp_path / "out")]) == 1
    assert f"error: source: {tmp_path / 'empty'} has neither" in capsys.readouterr().err


def test_two_conversions_to_one_folder(tmp_path, source, capsys, monkeypatch):
    """The second one says so at once, and does not disturb the first."""
    said = []

    def second(*args, original=partial.PartialCheckpoint.finish):
        said.append(command(tmp_path, capsys))
        said.append(run(tmp_path))
        original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(partial.PartialCheckpoint, "finish", second)
        convert(source, tmp_path / "out")
    message = f"error: destination: {tmp_path / 'out.partial'} is being written by another conversion; wait for its end"
    assert said == [(1, message)] * 2
    assert Checkpoint(tmp_path / "out").experts == [PATH]
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]
    assert command(tmp_path, capsys)[1].endswith("out exists already; remove it or choose another")


@pytest.mark.parametrize("empty", [True, False])
def test_a_destination_that_comes_into_being(tmp_path, source, monkeypatch, empty):
    def meanwhile(*args, original=partial.PartialCheckpoint.finish):
        (tmp_path / "out").mkdir()
        if not empty:
            (tmp_path / "out" / "mine").write_text("keep")
        original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(partial.PartialCheckpoint, "finish", meanwhile)
        with pytest.raises(FileExistsError, match="out exists already"):
            convert(source, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ([] if empty else ["mine"])


def test_shards_that_went_away_are_made_again(tmp_path, source):
    convert(source, tmp_path / "whole", max_shard_size="9KB")
    assert run(tmp_path, "--max-shard-size", "9KB", before=("kill_at", "rename", 1))[0] == -signal.SIGKILL
    next((tmp_path / "out.partial" / "checkpoint").glob("*.safetensors")).unlink()
    convert(source, tmp_path / "out", max_shard_size="9KB")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def flip(file, at):
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


DAMAGE = {
    "a weight": ("checkpoint/model-00002-*", lambda file: flip(file, -9)),
    "a header": ("checkpoint/model-00001-*", lambda file: flip(file, 20)),
    "an end": ("checkpoint/model-00001-*", lambda file: os.truncate(file, 700)),
    "a digit of the progress": ("progress.json", lambda file: flip(file, file.read_text().index('"nbytes"') + 11)),
    "half of the progress": ("progress.json", lambda file: os.truncate(file, 500)),
    "all of the progress": ("progress.json", lambda file: os.truncate(file, 0)),
    "zeros": ("progress.json", lambda file: file.write_bytes(bytes(800))),
    "another version": ("progress.json", lambda file: file.write_text('{"job": {}, "done": []}')),
}


@pytest.mark.parametrize(("pattern", "damage"), DAMAGE.values(), ids=DAMAGE)
def test_damage_of_an_interrupted_conversion(tmp_path, source, capsys, monkeypatch, pattern, damage):
    """Nothing of it gets into the result: the next call names the file and what to remove."""
    convert(source, tmp_path / "whole", max_shard_size="9KB")
    with monkeypatch.context() as patch:
        patch.setattr(partial.PartialCheckpoint, "finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", max_shard_size="9KB")
    (file,) = (tmp_path / "out.partial").glob(pattern)
    damage(file)
    for _ in range(2):
        status, said = command(tmp_path, capsys, "--max-shard-size", "9KB")
        assert (status, said) == (
            1,
            f"error: destination: {file} is damaged, or of another version; remove {tmp_path / 'out.partial'} to start"
            " anew",
        )
    shutil.rmtree(tmp_path / "out.partial")
    assert command(tmp_path, capsys, "--max-shard-size", "9KB") == (0, "")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_folder_that_is_not_ours_stays(tmp_path, source):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").write_text("keep")
    with pytest.raises(FileExistsError, match=r"out.partial exists and is of no conversion"):
        convert(source, tmp_path / "out")
    assert (tmp_path / "out.partial" / "mine").read_text() == "keep"


def test_a_destination_that_is_a_link_to_nothing(tmp_path, source):
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="out exists already"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_what_goes_along(tmp_path, source):
    wanted = ["LICENSE", "vocab.bpe", "merges.txt", "modeling_own.py", "tokenizer.model", "figures/a.png",
              "templates/chat.jinja", "deep/er/config.json"]  # fmt: skip
    left = ["weights.bin", "flax_model.msgpack", "original/consolidated.00.pth", "original/params.json", ".git/HEAD",
            "pytorch_model.bin.index.json", "adapter_config.json", "__pycache__/x.pyc", ".gitattributes"]  # fmt: skip
    for name in (*wanted, *left):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(name.encode())
    convert(source, source / "inside")  # its own working directory does not go along
    convert(source, tmp_path / "out")
    for folder in (source / "inside", tmp_path / "out"):
        found = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
        own = {"config.json", "hf_quant_config.json", "model.safetensors", "tokenizer.json"}
        assert found == {*wanted, *own}
        for name in wanted:
            assert (folder / name).read_bytes() == name.encode()


def test_what_cannot_go_along_is_told(tmp_path, source, caplog, monkeypatch):
    (source / "merges.txt").symlink_to(tmp_path / "removed from the cache")
    convert(source, tmp_path / "out")
    assert f"{source / 'merges.txt'} is not copied: it is a link to nothing" in caplog.text
    (source / "templates").mkdir()
    original = os.scandir

    def scandir(folder):  # tests may run as a user that may read everything
        if os.path.basename(folder) == "templates":
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return original(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError, match="templates"):
        convert(source, tmp_path / "two")
    monkeypatch.undo()
    convert(source, tmp_path / "two")  # resumes


def test_filter(tmp_path, capsys):
    plain_source(tmp_path / "source", layers=3)
    assert command(tmp_path, capsys, "--filter", "model.layers.0", "--filter", r"re:.*layers\.2\.") == (0, "")
    checkpoint = Checkpoint(tmp_path / "out")
    first, second, third = (PATH.replace("0", str(layer)) for layer in range(3))
    assert checkpoint.experts == [first, third]
    assert list(checkpoint.plain_blocks) == [second]
    before = Checkpoint(tmp_path / "source")
    for info in before.plain_blocks[second].infos():
        assert torch.equal(checkpoint.read(info.name), before.read(info.name))
    for pattern, message in (
        ("re:(", "filter: got 're:(', wanted a regular expression"),
        (r"layers\.[02]\.", rf"filter: 'layers\\.[02]\\.' fits no experts of {tmp_path / 'source'}"),
        ("experts", f"close names are '{PATH.replace('0', '*')}'"),
    ):
        status = main(["convert", str(tmp_path / "source"), str(tmp_path / "two"), "--filter", pattern])
        assert status == 1
        assert message in capsys.readouterr().err
    with pytest.raises(TypeError, match=r"filter: got a function of \(path\), wanted .* called as f\(module, name\)"):
        convert(tmp_path / "source", tmp_path / "two", filter=lambda path: True)


def test_words_of_other_writers(tmp_path):
    copy = copy_export(tmp_path, "modelopt_qwen3_moe")

    def edit(config):
        quantization = config["quantization_config"]
        quantization |= {"quant_algo": "nvfp4", "group_size": "16"}
        quantization["config_groups"]["group_0"]["weights"]["group_size"] = "16"

    edit_json(copy / "config.json", edit)
    assert Checkpoint(copy).read_experts(PATH).gate_up.shape == (3, 128, 32)
    edit_json(copy / "config.json", lambda config: config["quantization_config"].update(group_size="32"))
    with pytest.raises(ValueError, match="group_size: got '32', wanted 16"):
        Checkpoint(copy)
