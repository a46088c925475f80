"""What devices, links and the host say while steps run: sampled in a thread, aligned with steps, and judged.

`probes` are single readings (`nvml`, `host`, `network` make them), `Sampler` is the thread, `Session` is one rank's
telemetry of a run, `summarise` makes of all ranks' what a trial keeps. What cannot be read is absent, with the reason.
"""

from bench.telemetry.sampler import Probe, Sampler, Samples
from bench.telemetry.session import RankTelemetry, Session
from bench.telemetry.summary import Summary, summarise

__all__ = ["Probe", "RankTelemetry", "Sampler", "Samples", "Session", "Summary", "summarise"]
