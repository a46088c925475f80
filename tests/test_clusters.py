import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.clusters import CLUSTERS, GPUS, MAX_NODES, Cluster, get_cluster
from bench.errors import BadInput


@pytest.mark.parametrize("name", CLUSTERS)
def test_named_clusters_round_trip(name):
    cluster = get_cluster(name)
    assert cluster.name == name
    assert Cluster.parse(cluster.to_text()) == cluster


@given(st.sampled_from(sorted(set(GPUS) - {"cpu"})), st.integers(1, MAX_NODES))
@settings(max_examples=30, deadline=None)
def test_any_number_of_nodes_has_a_name(gpu, num_nodes):
    cluster = get_cluster(f"{gpu}x{num_nodes}")
    assert (cluster.num_gpus, cluster.gpus_per_node, cluster.gpu) == (8 * num_nodes, 8, GPUS[gpu])
    assert get_cluster(cluster.name) == cluster


def test_part_of_a_node():
    cluster = get_cluster("h200x2gpu")
    assert (cluster.num_nodes, cluster.gpus_per_node, cluster.nics_per_node, cluster.num_gpus) == (1, 2, 2, 2)


def test_figures_of_the_h800():
    h800 = get_cluster("h800x16")
    assert h800.num_gpus == 128
    assert h800.peak_flops("bf16") == 989e12
    assert h800.peak_flops("fp8") == pytest.approx(2 * h800.peak_flops("bf16"), rel=1e-3)
    assert h800.nic_bytes_per_s_per_gpu == 400e9 / 8
    assert 79 < h800.gpu.memory_bytes / 2**30 < 80


def test_a_share_of_fewer_nics():
    cluster = get_cluster("h800x2").model_copy(update={"nics_per_node": 4})
    assert cluster.nic_bytes_per_s_per_gpu == 25e9


def test_an_unknown_dtype_has_no_peak():
    with pytest.raises(BadInput) as caught:
        get_cluster("a100x1").peak_flops("fp8")
    assert (caught.value.field, caught.value.value) == ("dtype", "fp8")
    assert caught.value.allowed.startswith("bf16, fp16, fp32")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "h800",
        "h800x",
        "h800x0",
        "h800x16385",
        "h800x-1",
        "h800x1.5",
        "h900x2",
        "h200x9gpu",
        "cpux2",
        "x3",
    ],
)
def test_other_names_are_refused(name):
    with pytest.raises(BadInput) as caught:
        get_cluster(name)
    assert caught.value.value == name
    assert any(f"{gpu}x" in caught.value.allowed for gpu in GPUS)
    assert "\n" not in str(caught.value)


OWN = """
name = "own"
gpu = "h20"
num_nodes = 3
gpus_per_node = 4
nics_per_node = 2
nic_bytes_per_s = 25000000000
nvlink_latency_s = 4e-6
nic_latency_s = 1.2e-5
"""
OWN_GPU = """
[gpu]
name = "mine"
memory_bytes = 1000000000
hbm_bytes_per_s = 1e11
num_sms = 10
nvlink_bytes_per_s = 1e9
peak_tflops = {bf16 = 10}
"""


def read(tmp_path, text: str) -> Cluster:
    path = tmp_path / "own.toml"
    path.write_text(text)
    return get_cluster(str(path))


def test_a_file_names_a_known_gpu_or_brings_its_own(tmp_path):
    assert read(tmp_path, OWN).gpu == GPUS["h20"]
    own = read(tmp_path, OWN.replace('gpu = "h20"', "") + OWN_GPU)
    assert own.peak_flops("bf16") == 10e12
    path = tmp_path / "own.json"
    path.write_text(own.to_text())
    assert get_cluster(str(path)) == own


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('gpu = "h20"', 'gpu = "h21"', "cluster.gpu"),
        ("num_nodes = 3", "num_nodes = 0", "cluster.num_nodes"),
        ("num_nodes = 3", "num_nodes = 1000000", "cluster.num_nodes"),
        ("num_nodes = 3", "nodes = 3", "cluster.nodes"),
        ("num_nodes = 3", "", "cluster.num_nodes"),
        ("nic_latency_s = 1.2e-5", "nic_latency_s = 100.0", "cluster.nic_latency_s"),
        ("nic_latency_s = 1.2e-5", "nic_latency_s = nan", "cluster.nic_latency_s"),
        ("25000000000", "0.5", "cluster.nic_bytes_per_s"),
    ],
)
def test_bad_fields_are_named(tmp_path, old, new, field):
    with pytest.raises(BadInput) as caught:
        read(tmp_path, OWN.replace(old, new))
    assert caught.value.field == field


def test_bad_fields_of_a_gpu_are_named(tmp_path):
    text = OWN.replace('gpu = "h20"', "") + OWN_GPU
    for old, new, field in (
        ("num_sms = 10", "sms = 10", "cluster.gpu.sms"),
        ("bf16 = 10", "bf16 = -1", "cluster.gpu.peak_tflops.bf16"),
        ("{bf16 = 10}", "{}", "cluster.gpu.peak_tflops"),
    ):
        with pytest.raises(BadInput) as caught:
            read(tmp_path, text.replace(old, new))
        assert caught.value.field == field
