"""Shares of the roofline: limits, floors, means, the peers' file, and how the gemm suite reports them.
Called by pytest; calls benchmarks/harness/{roofline,report}.py and suites/{gemm,roofline}.py.
"""

import json
import pathlib

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.harness import report, roofline
from benchmarks.harness.timing import Timing, machine_name

RUN = ["gemm", "--device", "cpu", "--shapes", "small", "--rounds", "3", "--budget", "0.05", "--backends", "reference"]
PEERS = [
    dict(shape="a", gemm="gate_up", tokens=1, active=1, bf16=20.0, marlin=10.0, ours=5.0, ours_rel_error=0.1, floor=4),
    dict(shape="b", gemm="gate_up", tokens=1, bf16=20.0, marlin=40.0, ours=5.0, humming=None, floor=1.0),
    dict(shape="a", gemm="down", tokens=8, ogs=4.0, floor=3.0),
]


@pytest.fixture
def peers_file(tmp_path):
    def write(content):
        path = tmp_path / "peers.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


@pytest.mark.parametrize(("bf16", "dtype"), [(0.1, torch.bfloat16), (0.3, torch.float32)])
def test_limits_are_bytes_and_operations_over_medians(monkeypatch, bf16, dtype):
    """A CPU without instructions for bf16 takes a minute for a large product."""
    seconds = {"read": 0.5, "product": 0.125, "torch.bfloat16": bf16, "torch.float32": 0.2}
    results = {}

    def measure(functions, *, device, rounds):
        results.update({name: function() for name, function in functions.items()})
        assert (device, rounds) == (torch.device("cpu"), 7)
        return {name: Timing(seconds[name], (0, 1), 3, "fake") for name in functions}

    monkeypatch.setattr(roofline, "measure", measure)
    limits = roofline.Limits.measured(torch.device("cpu"), rounds=7)
    assert limits == roofline.Limits(2**20 / 0.5, 2 * 64**3 / 0.125)
    assert results["read"].dtype == torch.int64
    assert (results["product"].dtype, results["product"].shape) == (dtype, (64, 64))
    assert str(roofline.Limits(4.5e12, 750e12)) == "measured limits: read 4,500 GB/s, dense product 750 TFLOP/s"


def test_the_floor_is_the_larger_of_traffic_and_operations():
    gemm = dict(experts=2, n=32, k=16, rows=3, outputs=16)
    # 2 x 32 x 16 weights of 4.5 bits, and 3 rows of 16 values in and 16 out of 2 bytes each
    assert roofline.Limits(1.0, 1e9).floor_seconds(**gemm) == 576 + 192
    assert roofline.Limits(1e9, 1.0).floor_seconds(**gemm) == 2 * 3 * 32 * 16


def test_summary_is_the_geometric_mean_of_all_and_of_each_gemm():
    def row(shape, gemm, tokens, faster, share):
        return dict(shape=shape, gemm=gemm, tokens=tokens, times_faster={"cuda": faster},
                    floor_share={"bf16": 0.25, "cuda": share})  # fmt: skip

    rows = [row("a", "down", 8, 3, 0.5), row("a", "down", 1, 2, 0.2), row("b", "down", 1, 8, 0.8)]
    rows.append(row("a", "gate_up", 1, 4, 0.4))
    summary = roofline.summary(rows, "tokens")
    assert [(mean["gemm"], mean["tokens"]) for mean in summary] == [
        ("all", 1), ("all", 8), ("down", 1), ("down", 8), ("gate_up", 1),
    ]  # fmt: skip
    assert [mean["times_faster"]["cuda"] for mean in summary] == pytest.approx([4, 3, 4, 3, 4])
    assert [mean["floor_share"]["cuda"] for mean in summary] == pytest.approx([0.4, 0.5, 0.4, 0.5, 0.4])
    assert all(mean["floor_share"]["bf16"] == pytest.approx(0.25) for mean in summary)
    panels = roofline.panels(rows, "tokens")
    assert list(panels) == ["a", "b", "geometric mean"]
    assert panels["b"]["cuda"] == [(1, pytest.approx(80))]
    assert panels["a"]["cuda"] == [(1, pytest.approx(100 * 0.08**0.5)), (8, pytest.approx(50))]


def test_peers_are_read_with_their_own_floor(peers_file):
    peers = roofline.read_peers(peers_file(PEERS))
    first, _, ogs = roofline.summary(peers, "tokens")[:2] + peers[2:]
    assert first["times_faster"] == pytest.approx({"Marlin (vLLM)": 1, "thunder_moe": 4})
    assert first["floor_share"] == pytest.approx({"bf16": 0.1, "Marlin (vLLM)": 0.1, "thunder_moe": 0.4})
    assert (ogs["times_faster"], ogs["floor_share"]) == ({}, {"matmul_ogs (triton_kernels)": 0.75})
    assert "peers: Marlin (vLLM) is missing in 1 of 3 rows" in roofline.missing(peers)
    panels = roofline.panels(peers, "tokens", peers)
    assert panels["GEMM alone, geometric mean"] == panels["geometric mean"]
    assert list(panels["GEMM alone, down, geometric mean"]) == ["matmul_ogs (triton_kernels)"]


def test_a_peers_file_is_drawn_by_itself(peers_file, capsys, tmp_path):
    file = peers_file(PEERS)
    assert main(["roofline", file]) == roofline.summary(roofline.read_peers(file), "tokens")
    image = pathlib.Path(file).with_suffix(".png")
    assert image.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert str(image) in printed
    assert "Marlin (vLLM) is missing in 1 of 3 rows" in printed
    with pytest.raises(SystemExit):
        main(["roofline", str(tmp_path / "none.json")])
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "peers.json: Expecting property name"),
        ([], "got no rows, wanted a JSON list"),
        ({"rows": PEERS}, "got no rows, wanted a JSON list"),
        ([3], "got 3, wanted an object"),
        ([dict(shape="a", gemm="down", tokens=1, floor=1.0)], "with a time of one of bf16, marlin, ogs, humming, ours"),
        ([{**PEERS[0], "gemm": "up"}], "the gemm gate_up or down"),
        ([{**PEERS[0], "shape": None}], "wanted a shape's name"),
        ([{**PEERS[0], "tokens": "8"}], "tokens: got '8'"),
        ([PEERS[0], {**PEERS[0], "floor": None}], "floor: got None"),
        ([{**PEERS[0], "ours": 0.0}], "ours: got 0.0"),
        ([{**PEERS[0], "bf16": float("nan")}], "bf16: got nan"),
    ],
)
def test_bad_peers_are_named(capsys, peers_file, content, message):
    with pytest.raises(SystemExit):
        main([*RUN, "--tokens", "1", "--peers", peers_file(content)])
    error = capsys.readouterr().err
    assert "argument --peers: " in error
    assert message in error


def test_peers_need_a_file_and_tokens(capsys, peers_file, tmp_path):
    for arguments, message in (
        (["--tokens", "1", "--peers", str(tmp_path / "none.json")], "No such file"),
        (["--rows-per-expert", "1", "--peers", peers_file(PEERS)], "wanted --tokens too"),
    ):
        with pytest.raises(SystemExit):
            main([*RUN, *arguments])
        error = capsys.readouterr().err
        assert "argument --peers: " in error
        assert message in error


def test_gemm_reports_shares_of_the_floor(tmp_path, capsys, monkeypatch, peers_file):
    limits = roofline.Limits(1e9, 1e10)
    monkeypatch.setattr(roofline.Limits, "measured", lambda device, **how: limits)
    drawn = {}

    def plot_lines(path, panels, **options):
        drawn.update(panels)
        return report.plot_lines(path, panels, **options)

    monkeypatch.setattr(roofline, "plot_lines", plot_lines)
    arguments = ["--gemms", "gate_up,gate_up_swiglu", "--tokens", "2", "--output", str(tmp_path)]
    rows = main([*RUN, *arguments, "--peers", peers_file(PEERS)])
    content = json.loads((tmp_path / f"gemm_{machine_name(torch.device('cpu'))}.json").read_text())
    assert content["rows"] == json.loads(json.dumps(rows))
    assert (content["read_bytes_per_second"], content["flops_per_second"]) == (1e9, 1e10)
    for row, outputs in zip(rows, (512, 256), strict=True):
        traffic = row["active_experts"] * 512 * 512 * 9 / 16 + row["rows"] * (512 + outputs) * 2
        assert row["floor_seconds"] == pytest.approx(max(traffic / 1e9, 2 * row["rows"] * 512 * 512 / 1e10))
        assert row["floor_share"] == {
            name: row["floor_seconds"] / timing["median"] for name, timing in row["seconds"].items()
        }
    assert [(mean["gemm"], mean["tokens"]) for mean in content["summary"]] == [
        ("all", 2), ("gate_up", 2), ("gate_up_swiglu", 2),
    ]  # fmt: skip
    both = content["summary"][0]["floor_share"]["reference"]
    assert both**2 == pytest.approx(rows[0]["floor_share"]["reference"] * rows[1]["floor_share"]["reference"])
    assert content["peers"] == roofline.summary(roofline.read_peers(peers_file(PEERS)), "tokens")
    assert (tmp_path / f"gemm_{machine_name(torch.device('cpu'))}_roofline.png").read_bytes().startswith(b"\x89PNG")
    assert list(drawn)[:3] == ["small", "geometric mean", "GEMM alone, geometric mean"]
    assert drawn["geometric mean"]["reference"] == [(2, pytest.approx(100 * both))]
    printed = capsys.readouterr().out
    for text in ("% of floor bf16", "% of floor reference", "read 1 GB/s", "x thunder_moe", "_roofline.png"):
        assert text in printed
