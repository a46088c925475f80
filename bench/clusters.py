"""GPUs and the clusters made of them: peaks, memories, links and latencies."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from bench.errors import BadInput, from_pydantic, unknown
from bench.files import looks_like_path, parse_mapping, read_mapping

Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Tflops = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
BytesPerSecond = Annotated[float, Field(ge=1e6, le=1e15, allow_inf_nan=False)]
Latency = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]

MAX_NODES = 16384
PCIE5_BYTES_PER_S = 64e9  # 16 lanes of 32 GT/s, each direction
GPUS_PER_NODE = 8


class Gpu(BaseModel):
    """One accelerator.

    Attributes:
        peak_tflops: dense matrix-multiply peak by dtype in 1e12 FLOP/s; a fused multiply-add is 2.
        num_sms: streaming multiprocessors.
        nvlink_bytes_per_s: usable bandwidth per direction to the other GPUs of the node, all peers together.
        host_bytes_per_s: bandwidth per direction to the host's memory; PCIe 5.0 x16 unless said otherwise. Left out of
            the text where it is that, as descriptions without it have always been.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Name
    peak_tflops: Annotated[dict[Name, Tflops], Field(min_length=1, max_length=32)]
    memory_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 50)]
    hbm_bytes_per_s: BytesPerSecond
    num_sms: Annotated[int, Field(ge=1, le=4096)]
    nvlink_bytes_per_s: BytesPerSecond
    host_bytes_per_s: BytesPerSecond = PCIE5_BYTES_PER_S

    @model_serializer(mode="wrap")
    def _without_usual_link(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if self.host_bytes_per_s == PCIE5_BYTES_PER_S:
            del fields["host_bytes_per_s"]
        return fields

    def peak_flops(self, dtype: str) -> float:
        """Dense peak in FLOP/s. Raises ``BadInput`` for a dtype without one."""
        if dtype not in self.peak_tflops:
            raise unknown("dtype", dtype, self.peak_tflops)
        return self.peak_tflops[dtype] * 1e12

    def __hash__(self) -> int:
        return hash(
            (self.name, tuple(sorted(self.peak_tflops.items())), self.memory_bytes, self.hbm_bytes_per_s)
        )


class Cluster(BaseModel):
    """Equal nodes of equal GPUs. Bandwidths are bytes/s per direction, latencies seconds per message."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Name
    gpu: Gpu
    num_nodes: Annotated[int, Field(ge=1, le=MAX_NODES)]
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)]
    nics_per_node: Annotated[int, Field(ge=1, le=1024)]
    nic_bytes_per_s: BytesPerSecond
    nvlink_latency_s: Latency
    nic_latency_s: Latency

    def __hash__(self) -> int:
        # A few fields tell most apart, and what is found once is looked up by these again and again.
        return hash((self.name, self.num_nodes, self.gpus_per_node))

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def nic_bytes_per_s_per_gpu(self) -> float:
        """A GPU's share of its node's NICs, per direction."""
        return self.nic_bytes_per_s * self.nics_per_node / self.gpus_per_node

    def peak_flops(self, dtype: str) -> float:
        """Dense peak of one GPU in FLOP/s. Raises ``BadInput`` for a dtype without one."""
        return self.gpu.peak_flops(dtype)

    def to_text(self) -> str:
        """JSON with sorted keys; ``parse`` is its inverse."""
        return json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The cluster that ``to_text`` wrote. Raises ``BadInput``."""
        return cls.from_fields(parse_mapping(text, "json", "cluster"))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """The cluster of a mapping of fields; ``gpu`` may be the name of a known one. Raises ``BadInput``."""
        given = dict(fields)
        if isinstance(given.get("gpu"), str):
            if given["gpu"] not in GPUS:
                raise unknown("cluster.gpu", given["gpu"], GPUS)
            given["gpu"] = GPUS[given["gpu"]]
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise from_pydantic(error, "cluster", cls) from None


def get_cluster(name_or_path: str) -> Cluster:
    """A cluster by name, or one read from a JSON or TOML file with the fields of ``Cluster``.

    Names are ``cpu``, ``<gpu>x<nodes>`` (nodes of 8 GPUs, one 400 Gb/s NIC each; ``h800x16`` is 128 GPUs) and
    ``<gpu>x<n>gpu`` (n GPUs of one node). Raises ``BadInput``.
    """
    if looks_like_path(name_or_path):
        return Cluster.from_fields(read_mapping(Path(name_or_path), "cluster"))
    if name_or_path in CLUSTERS:
        return CLUSTERS[name_or_path]
    match = re.fullmatch(r"(.+)x([0-9]{1,9})(gpu)?", name_or_path)
    if not match:
        raise unknown(
            "cluster", name_or_path, [*CLUSTERS, "<gpu>x<nodes>", "<gpu>x<n>gpu", "a .json or .toml file"]
        )
    gpu_name, count, partial = match[1], int(match[2]), bool(match[3])
    known = [name for name in GPUS if name != "cpu"]
    if gpu_name not in known:
        raise unknown("cluster", name_or_path, [f"{name}x<nodes>" for name in known])
    most = GPUS_PER_NODE if partial else MAX_NODES
    if not 1 <= count <= most:
        what = "GPUs of one node" if partial else f"nodes of {GPUS_PER_NODE} GPUs"
        raise BadInput(
            "cluster", name_or_path, f"{gpu_name}x<n>{'gpu' if partial else ''} with 1 to {most} {what}"
        )
    return _cluster(gpu_name, count, partial)


def _cluster(gpu_name: str, count: int, partial: bool = False) -> Cluster:
    """``count`` nodes of 8 GPUs, or one node with ``count`` GPUs."""
    gpus_per_node = count if partial else GPUS_PER_NODE
    return Cluster(
        name=f"{gpu_name}x{count}{'gpu' if partial else ''}",
        gpu=GPUS[gpu_name],
        num_nodes=1 if partial else count,
        gpus_per_node=gpus_per_node,
        nics_per_node=gpus_per_node,
        # ConnectX-7: 400 Gb/s, one per GPU (deepseek-ai/DeepEP README).
        nic_bytes_per_s=50e9,
        # The usual order of an NCCL message inside a node and over InfiniBand (nccl-tests at small sizes).
        nvlink_latency_s=5e-6,
        nic_latency_s=10e-6,
    )


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # Memory is the total that the driver reports (nvidia-smi). fp8 is twice bf16 and fp32 is without
        # tensor cores, both from NVIDIA's data sheets, as is what a comment does not name. MegaScale-MoE
        # (arXiv 2505.11432), table 4: 989 TFLOP/s, NVLink 400 GB/s both ways; deepseek-ai/DeepEP's README
        # gives about 160 GB/s per direction. The data sheet's 3.35 TB/s (the table rounds to 3.4).
        Gpu(
            name="h800",
            peak_tflops={"bf16": 989.0, "fp16": 989.0, "fp8": 1979.0, "fp32": 67.0},
            memory_bytes=81559 * 2**20,
            hbm_bytes_per_s=3.35e12,
            num_sms=132,
            nvlink_bytes_per_s=160e9,
        ),
        # H100 SXM data sheet; NVLink 900 GB/s both ways, 80 % of it usable as on the H200.
        Gpu(
            name="h100",
            peak_tflops={"bf16": 989.4, "fp16": 989.4, "fp8": 1978.9, "fp32": 67.0},
            memory_bytes=81559 * 2**20,
            hbm_bytes_per_s=3.35e12,
            num_sms=132,
            nvlink_bytes_per_s=360e9,
        ),
        # H200 SXM data sheet; NVLink 900 GB/s both ways, 80 % of it usable: on two of one host NCCL moved
        # 301 GB/s and copy engines 389 GB/s per direction.
        Gpu(
            name="h200",
            peak_tflops={"bf16": 989.0, "fp16": 989.0, "fp8": 1979.0, "fp32": 67.0},
            memory_bytes=143771 * 2**20,
            hbm_bytes_per_s=4.8e12,
            num_sms=132,
            nvlink_bytes_per_s=360e9,
        ),
        # MegaScale-MoE, table 4: 148 TFLOP/s, 96 GB, 4.0 TB/s, NVLink 900 GB/s both ways; 78 SMs.
        Gpu(
            name="h20",
            peak_tflops={"bf16": 148.0, "fp16": 148.0, "fp8": 296.0, "fp32": 44.0},
            memory_bytes=97871 * 2**20,
            hbm_bytes_per_s=4.0e12,
            num_sms=78,
            nvlink_bytes_per_s=360e9,
        ),
        # MegaScale-MoE, table 4: 312 TFLOP/s, 80 GB, 2.0 TB/s, NVLink 600 GB/s both ways; 108 SMs.
        Gpu(
            name="a100",
            peak_tflops={"bf16": 312.0, "fp16": 312.0, "fp32": 19.5},
            memory_bytes=81920 * 2**20,
            hbm_bytes_per_s=2.0e12,
            num_sms=108,
            nvlink_bytes_per_s=240e9,
            host_bytes_per_s=32e9,  # PCIe 4.0 x16
        ),
        # HGX B200 data sheet: 2250 TFLOP/s, 180 GB, 8 TB/s, NVLink 1800 GB/s both ways; 148 SMs.
        Gpu(
            name="b200",
            peak_tflops={"bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0, "fp32": 75.0},
            memory_bytes=183359 * 2**20,
            hbm_bytes_per_s=8.0e12,
            num_sms=148,
            nvlink_bytes_per_s=720e9,
        ),
        # One process of a laptop: an assumption, for local runs beside a simulation, not a data sheet. It has room for
        # what the cost model sets aside on a GPU.
        Gpu(
            name="cpu",
            peak_tflops={"fp32": 0.05, "bf16": 0.05},
            memory_bytes=8 * 2**30,
            hbm_bytes_per_s=1e10,
            num_sms=1,
            nvlink_bytes_per_s=1e9,
        ),
    )
}

CLUSTERS: dict[str, Cluster] = {
    cluster.name: cluster
    for cluster in (
        _cluster("h800", 1),
        _cluster("h800", 16),
        _cluster("h100", 16),
        _cluster("h200", 16),
        _cluster("h20", 16),
        _cluster("a100", 16),
        _cluster("b200", 16),
        _cluster("h200", 2, partial=True),
        # Processes of one laptop, whose links are loopback sockets: an assumption.
        Cluster(
            name="cpu",
            gpu=GPUS["cpu"],
            num_nodes=1,
            gpus_per_node=64,
            nics_per_node=64,
            nic_bytes_per_s=1e9,
            nvlink_latency_s=1e-4,
            nic_latency_s=1e-4,
        ),
    )
}
