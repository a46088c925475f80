"""Telemetry: readings of real files and processes, sums by hand, faults, and what a run says of itself."""

from __future__ import annotations

import gc
import importlib.util
import mmap
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from cases import make_case
from hypothesis import given
from hypothesis import strategies as st

from bench.errors import BadInput
from bench.execute.pool import RankPool
from bench.measured import measure
from bench.telemetry import Probe, RankTelemetry, Sampler, Samples, Session, summarise
from bench.telemetry.energy import WRAP_32, counted, integrated, points, resolution_s
from bench.telemetry.host import HOST_FIELDS, host_probes
from bench.telemetry.network import network_probes
from bench.telemetry.nvml import GPU_FIELDS, no_gpu, open_gpu, reasons_of
from bench.telemetry.session import StepSpan
from bench.telemetry.verdict import disturbances, judge

CUDA = importlib.util.find_spec("torch") is not None and __import__("torch").cuda.is_available()


def wait_for(samples: Samples, count: int) -> None:
    """Until the thread has taken so many; time-outs of the test suite end what never comes."""
    while len(samples) < count and not samples.ended:
        time.sleep(0.005)


def rank_of(
    number: int = 0, steps: Sequence[StepSpan] = (), host: str = "h", **columns: Sequence[float | None]
) -> RankTelemetry:
    samples = Samples(0.1, {name: list(values) for name, values in columns.items()}, elapsed_s=1.0)
    return RankTelemetry(number, host, samples, steps=list(steps))


def counter_file(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


def test_counters_of_ports_and_interfaces_are_summed_in_bytes(tmp_path: Path) -> None:
    for port, words in (("mlx5_0", 100), ("mlx5_1", 11)):
        counter_file(tmp_path / "infiniband" / port / "ports" / "1" / "counters" / "port_xmit_data", words)
        counter_file(tmp_path / "infiniband" / port / "ports" / "1" / "counters" / "port_rcv_data", 1)
    for name, device in (("eth0", True), ("docker0", False), ("lo", False)):
        counter_file(tmp_path / "net" / name / "statistics" / "tx_bytes", 1000)
        counter_file(tmp_path / "net" / name / "statistics" / "rx_bytes", 5)
        if device:
            (tmp_path / "net" / name / "device").mkdir()
    probes, absent = network_probes(tmp_path)
    read = {name: value for probe in probes for name, value in zip(probe.fields, probe.read(), strict=True)}
    assert read == {
        "ib_tx_bytes": 444, "ib_rx_bytes": 8, "eth_tx_bytes": 1000, "eth_rx_bytes": 5,
        "lo_tx_bytes": 1000, "lo_rx_bytes": 5,
    }  # fmt: skip
    assert absent == {}
    assert set(network_probes(tmp_path / "none")[1]) == set(read)


NEW_BYTES = 1 << 25


def test_the_hosts_own_readings_rise() -> None:
    probes, absent = host_probes()
    assert absent == {}
    first = [value for probe in probes for value in probe.read()]
    # A mapping of its own: an array might get pages that the process has already.
    with mmap.mmap(-1, NEW_BYTES) as pages:
        pages.write(bytes(NEW_BYTES))
        second = [value for probe in probes for value in probe.read()]
    change = dict(zip(HOST_FIELDS, np.subtract(second, first), strict=True))
    assert change["process_minor_faults"] > 0
    assert change["process_cpu_s"] >= 0
    assert change["process_rss_bytes"] > NEW_BYTES / 2


def test_where_there_is_no_nvml_every_gpu_field_is_absent_with_the_reason() -> None:
    if CUDA:
        pytest.skip("this machine has it")
    gpu = open_gpu(0)
    assert gpu.probes == []
    assert set(gpu.absent) == set(GPU_FIELDS)
    assert all("NVML" in reason for reason in gpu.absent.values())


def test_a_reading_that_fails_half_way_keeps_what_was_read(tmp_path: Path) -> None:
    """A device that goes away: its file is removed while the sampler reads it. The other goes on."""
    counter_file(tmp_path / "a", 1)
    counter_file(tmp_path / "b", 2)
    probes = [Probe((name,), lambda name=name: [float((tmp_path / name).read_text())]) for name in "ab"]
    probes.append(Probe(("c",), lambda: [float((tmp_path / "c").read_text())]))
    sampler = Sampler(probes, hz=200)
    sampler.start()
    wait_for(sampler.samples, 5)
    (tmp_path / "a").unlink()
    gone = len(sampler.samples)
    wait_for(sampler.samples, gone + 10)
    samples = sampler.stop()
    assert {len(values) for values in samples.columns.values()} == {len(samples)}
    assert samples.columns["a"][:5] == [1.0] * 5
    assert samples.columns["a"][-5:] == [None] * 5
    assert set(samples.columns["b"]) == {2.0}
    assert set(samples.absent) == {"a", "c"}
    assert samples.absent["a"].startswith("after ") and "FileNotFoundError" in samples.absent["a"]
    assert samples.absent["c"].startswith("FileNotFoundError")
    assert samples.ended == ""


def test_a_sampler_that_ends_by_an_error_says_so_and_keeps_its_samples() -> None:
    calls = iter(range(50))

    def clock() -> float:
        try:
            return float(next(calls))
        except StopIteration:
            raise OSError("the clock is gone") from None

    sampler = Sampler([Probe(("x",), lambda: [7.0])], hz=500, clock=clock)
    sampler.start()
    wait_for(sampler.samples, 10**6)
    samples = sampler.stop()
    assert samples.ended == "OSError: the clock is gone"
    assert len(samples) > 10
    assert set(samples.columns["x"]) == {7.0}
    one = RankTelemetry(0, "h", samples)
    facts = summarise([one], 0, 0, 1).facts
    assert facts["sampler"]["ended_early"]["reason"] == samples.ended


def test_samples_that_come_too_late_are_counted_and_not_made_up_for() -> None:
    slow = threading.Event()
    sampler = Sampler([Probe(("x",), lambda: [slow.wait(0.05)])], hz=100)
    sampler.start()
    wait_for(sampler.samples, 4)
    samples = sampler.stop()
    assert samples.missed > 0
    assert samples.longest_read_s >= 0.05
    assert samples.read_s <= samples.elapsed_s + 0.06


def test_what_costs_much_is_read_less_often_and_every_cost_is_told() -> None:
    """At 100 Hz and 2 % of a processor there are 200 us a sample: less than one reading of `dear`."""

    def dear() -> list[float]:
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        return [1.0]

    probes = [Probe(("dear",), dear), Probe(("cheap",), lambda: [2.0]), Probe(("rare",), lambda: [3.0], every=7)]
    sampler = Sampler(probes, hz=100, max_share=0.02)
    sampler.start()
    wait_for(sampler.samples, 40)
    samples = sampler.stop()
    read = {name: sum(value is not None for value in samples.columns[name]) for name in ("dear", "cheap", "rare")}
    assert read["cheap"] == len(samples)
    # The first sample and the last are of everything.
    assert 3 <= read["dear"] <= len(samples) // samples.readings["dear"].every + 3
    assert samples.readings["dear"].every >= 10
    assert samples.readings["dear"].cpu_s >= 0.002
    assert (samples.readings["cheap"].every, samples.readings["rare"].every) == (1, 7)
    assert samples.columns["dear"][0] == samples.columns["dear"][-1] == 1.0


def test_probes_of_more_weight_are_read_more_often() -> None:
    def dear() -> list[float]:
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            pass
        return [1.0]

    probes = [Probe(("much",), dear, weight=4.0), Probe(("little",), dear)]
    sampler = Sampler(probes, hz=100, max_share=0.05)
    sampler.start()
    wait_for(sampler.samples, 15)
    readings = sampler.stop().readings
    assert readings["much"].every < readings["little"].every


def test_a_pause_takes_no_samples_and_misses_none() -> None:
    sampler = Sampler([Probe(("x",), lambda: [1.0])], hz=50)
    sampler.start()
    wait_for(sampler.samples, 3)
    with sampler.paused():
        time.sleep(1.0)  # one may be under way, on a machine that has much else to do
        before, missed = len(sampler.samples), sampler.samples.missed
        time.sleep(0.6)
        assert len(sampler.samples) == before
    wait_for(sampler.samples, before + 3)
    samples = sampler.stop()
    assert np.diff(np.array(samples.columns["time_s"], dtype=float)).max() >= 0.6
    assert samples.missed - missed < 25
    paused = Sampler([], hz=100)
    paused.start()
    with paused.paused():
        assert paused.stop().ended == ""


@pytest.mark.parametrize("hz", [0.0, -1.0, 1e6, float("nan")])
def test_a_rate_out_of_range_is_refused(hz: float) -> None:
    with pytest.raises(BadInput, match=r"telemetry\.hz"):
        Sampler([], hz)


def test_a_session_notes_collections_and_leaves_nothing_behind() -> None:
    callbacks, threads = list(gc.callbacks), threading.active_count()
    session = Session(3, no_gpu("none here"), hz=100)
    start = time.perf_counter()

    def fail() -> None:
        with session:
            gc.collect()
            session.step(0, start, time.perf_counter(), 8.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    found = session.result
    assert gc.callbacks == callbacks
    assert threading.active_count() == threads
    assert any(p.kind == "gc" and start <= p.start_s <= p.end_s <= found.steps[0].end_s for p in found.pauses)
    assert found.samples.absent["power_w"] == "none here"
    assert "power_w" not in found.samples.columns
    assert len(found.samples) >= 2


def test_energy_by_hand() -> None:
    """100 W for 10 s, then 300 W for 10 s: 1 kJ and 3 kJ."""
    times = [0.0, 10.0, 10.0001, 20.0]
    columns = {"time_s": times, "energy_j": [50.0, 1050.0, 1050.03, 4050.0], "power_w": [100.0, 100.0, 300.0, 300.0]}
    assert counted(columns, "energy_j", 0.0, 20.0) == pytest.approx(4000.0)
    assert counted(columns, "energy_j", 5.0, 10.0) == pytest.approx(500.0)
    assert integrated(columns, "power_w", 0.0, 20.0) == pytest.approx(4000.0, rel=1e-4)
    assert integrated(columns, "power_w", 12.0, 13.0) == pytest.approx(300.0)
    assert counted(columns, "energy_j", -1.0, 5.0) is None
    assert integrated(columns, "power_w", 5.0, 20.5) is None
    assert counted(columns, "missing", 0.0, 1.0) is None


def test_counters_wrap_at_32_bits_and_are_not_guessed_where_they_are_reset() -> None:
    columns = {"time_s": [0.0, 1.0, 2.0], "x": [WRAP_32 - 10, 5.0, 7.0], "y": [100.0, 0.0, 3.0]}
    assert counted(columns, "x", 0.0, 2.0) == 17.0
    assert counted(columns, "y", 0.0, 2.0) == 3.0
    assert resolution_s(columns, "x") == 1.0
    assert resolution_s({"time_s": [0.0, 1.0], "x": [1.0, 1.0]}, "x") is None


@given(
    st.lists(st.tuples(st.floats(0, 100), st.one_of(st.none(), st.floats(0, 1e4))), max_size=30),
    st.floats(0, 100),
    st.floats(0, 100),
)
def test_whatever_the_clock_does_energy_is_absent_or_within_what_was_read(
    rows: list[tuple[float, float | None]], a: float, b: float
) -> None:
    columns = {"time_s": [time for time, _ in rows], "power_w": [value for _, value in rows]}
    times, values = points(columns, "power_w")
    assert np.all(np.diff(times) > 0)
    start, end = sorted((a, b))
    found = integrated(columns, "power_w", start, end)
    if found is not None:
        slack = 1e-6 * (1 + values.max())
        assert (end - start) * values.min() - slack <= found <= (end - start) * values.max() + slack


def run_of_two() -> list[RankTelemetry]:
    """Two GPUs at 100 W and 200 W for 4 s, 4 steps of 1 s, of which each sends 10 B."""
    ranks = []
    for number, watts in enumerate((100.0, 200.0)):
        times = [i / 4 for i in range(-4, 21)]
        steps = [StepSpan(i, float(i), i + 1.0, 10.0) for i in range(4)]
        columns = {
            "time_s": times,
            "energy_j": [watts * (t + 1) for t in times],
            "power_w": [watts] * len(times),
            "event_reasons": [0.0] * len(times),
            "other_processes": [0.0] * len(times),
            "nvlink_tx_bytes": [24.0 * (t + 1) for t in times],
            "ib_tx_bytes": [7.0 * (t + 1) for t in times],
        }
        ranks.append(rank_of(number, steps, **columns))
        ranks[-1].samples.absent["power_instant_w"] = "the driver has none"
    return ranks


def test_a_summary_by_hand() -> None:
    found = summarise(run_of_two(), 1, 3, tokens_per_step=50)
    facts = found.facts
    assert facts["energy_by"] == "counter"
    assert facts["counter_energy_j"] == pytest.approx(900.0)
    assert facts["power_energy_j"] == pytest.approx(900.0)
    assert facts["integrated_field"] == "power_w"
    assert facts["mean_power_w_per_gpu"] == pytest.approx(150.0)
    assert found.metrics["joules_per_token"] == pytest.approx(6.0)
    assert found.step_samples["step_energy_j"] == pytest.approx([300.0] * 4)
    assert found.step_samples["step_power_w"] == pytest.approx([300.0] * 4)
    assert facts["bytes"]["planned_per_step"] == pytest.approx(20.0)
    assert facts["bytes"]["nvlink_tx_bytes_per_step"] == pytest.approx(48.0)
    assert facts["bytes"]["ib_tx_bytes_per_step"] == pytest.approx(7.0)  # both ranks read the same host's ports
    assert facts["bytes"]["counted_over_planned"] == pytest.approx({"nvlink": 2.4, "ib": 0.35})
    assert facts["verdict"] == "clean"
    assert facts["unchecked"] == {}
    assert len(found.samples["rank"]) == len(found.samples["energy_j"]) == 50
    assert found.step_samples["step_start_s"] == [0.0, 1.0, 2.0, 3.0]
    assert found.samples["time_s"][:2] == [-1.0, -0.75]


def test_a_sum_that_lacks_a_gpu_is_absent_and_never_a_smaller_sum() -> None:
    ranks = run_of_two()
    ranks[1].samples.columns["energy_j"] = [None] * len(ranks[1].samples)
    ranks[1].samples.absent["energy_j"] = "Not Supported"
    found = summarise(ranks, 1, 3, tokens_per_step=50)
    assert "counter_energy_j" not in found.facts
    assert found.facts["absent"]["counter_energy_j"] == "Not Supported"
    assert found.facts["energy_by"] == "power"
    assert set(found.step_samples) == {"step_start_s"}
    ranks[0].samples.columns["power_w"] = [None] * len(ranks[0].samples)
    found = summarise(ranks, 1, 3, tokens_per_step=50)
    assert found.metrics == {}
    assert "energy_j" not in found.facts


def test_ranks_that_brought_nothing_leave_no_sum_over_all() -> None:
    ranks = run_of_two()
    for one in ranks:
        one.num_ranks = 3
    found = summarise(ranks, 1, 3, tokens_per_step=50)
    assert found.metrics == {}
    assert set(found.step_samples) == {"step_start_s"}
    assert "energy_j" not in found.facts
    assert found.facts["bytes"] == {}
    assert found.facts["absent"]["counter_energy_j"] == "1 of 3 ranks brought no telemetry"


def test_steps_shorter_than_the_counter_tells_apart_have_no_energy_of_their_own() -> None:
    ranks = run_of_two()
    for one in ranks:
        one.steps[:] = [StepSpan(i, i / 10, (i + 1) / 10, 0.0) for i in range(4)]
    found = summarise(ranks, 0, 3, tokens_per_step=1)
    assert set(found.step_samples) == {"step_start_s"}
    assert "a step took 0.1 s" in found.facts["absent"]["step_energy_j"]


@pytest.mark.parametrize(
    ("mask", "others", "word"),
    [(0, 0, "clean"), (1, 0, "clean"), (0x4, 0, "power-capped"), (0x40 | 0x4, 0, "throttled"), (0x80, 2, "shared GPU")],
)
def test_the_verdict_names_the_worst_of_the_window(mask: int, others: int, word: str) -> None:
    ranks = run_of_two()
    at = ranks[1].samples.columns["time_s"].index(2.0)
    ranks[1].samples.columns["event_reasons"][at] = float(mask)
    ranks[1].samples.columns["other_processes"][at] = float(others)
    windows = [(1.0, 4.0)] * 2
    assert judge(ranks, windows).word == word
    assert judge(ranks, [(2.5, 4.0)] * 2).word == "clean"
    kinds = {kind for kind, start, end in disturbances(ranks) if (start, end) == (2.0, 2.25)}
    assert ("throttled" in kinds) == bool(mask & 0xE8)
    assert reasons_of(0x44) == ["hardware thermal slowdown", "software power cap"]


def test_without_event_reasons_there_is_no_verdict() -> None:
    ranks = run_of_two()
    for one in ranks:
        del one.samples.columns["event_reasons"]
        one.samples.absent["event_reasons"] = "Not Supported"
    found = judge(ranks, [(0.0, 4.0)] * 2)
    assert found.word is None
    assert found.unchecked == {"event_reasons": "Not Supported"}


def test_a_run_keeps_its_telemetry(pool: RankPool) -> None:
    case = make_case("ep", cluster="cpu", ep=2, microbatches=2)
    trial = measure(case, steps=4, pool=pool, telemetry_hz=50).trial
    assert trial.status == "ok"
    assert trial.telemetry["verdict"] is None
    assert trial.telemetry["absent"]["energy_j"] == "the run uses no GPU"
    assert "joules_per_token" not in trial.metrics
    assert trial.telemetry["bytes"]["planned_per_step"] > 0
    # What the plan sends goes over the loopback, with what the sums and the collectives need, and others' traffic.
    assert trial.telemetry["bytes"]["lo_tx_bytes_per_step"] >= trial.telemetry["bytes"]["planned_per_step"]
    assert set(trial.telemetry_samples["rank"]) == {0.0, 1.0}
    assert trial.telemetry["sampler"]["num_samples"] == len(trial.telemetry_samples["rank"])
    assert trial.steady["last_step"] == 3
    assert len(trial.samples["step_time_s"]) == 4
    assert measure(case, steps=1, pool=pool, telemetry_hz=None).trial.telemetry == {}


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_real_gpu_tells_power_energy_clocks_and_reasons() -> None:
    import torch

    torch.zeros(1, device="cuda")
    with Session(0, open_gpu(0), hz=50) as session:
        a = torch.randn(4096, 4096, device="cuda")
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            a @ a
            torch.cuda.synchronize()
    columns = session.result.samples.columns
    for field in ("power_w", "energy_j", "temperature_c", "sm_clock_mhz", "memory_used_bytes", "event_reasons"):
        assert points(columns, field)[1].size, session.result.samples.absent.get(field)
    assert np.all(np.diff(points(columns, "energy_j")[1]) >= 0)
