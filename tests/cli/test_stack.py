"""From the options of `pannier serve` to one configuration per process."""

import tomllib
from pathlib import Path

import pytest

from pannier.cli.stack import ServeOptions, plan
from pannier.runtime.config import AttentionConfig, ComputeConfig, load, to_toml
from pannier.runtime.errors import ConfigError

FOLDER = Path("/run/stack")


def test_the_default_is_one_of_each() -> None:
    """Everything talks over sockets in the stack's own folder."""
    stack = plan(ServeOptions("m"), FOLDER)
    assert [worker.name for worker in stack.workers] == ["compute-0", "attention-0"]
    assert {worker.gateway for worker in stack.workers} == {stack.gateway.control_endpoint}
    assert stack.gateway.control_endpoint.startswith("ipc:///run/stack/")


def test_one_worker_for_each_device() -> None:
    """And the gateway waits for all of them."""
    stack = plan(ServeOptions("m", compute="cuda:0,cuda:1", attention="cpu,cuda:2,cpu"), FOLDER)
    assert [worker.device for worker in stack.workers] == ["cuda:0", "cuda:1", "cpu", "cuda:2", "cpu"]
    assert (stack.gateway.compute_workers, stack.gateway.attention_workers) == (2, 3)


def test_a_number_of_attention_workers_means_cpus() -> None:
    """With names and sockets of their own, and equal parts of the memory."""
    workers = [w for w in plan(ServeOptions("m", attention="3"), FOLDER).workers if isinstance(w, AttentionConfig)]
    assert [worker.device for worker in workers] == ["cpu"] * 3
    assert len({worker.listen for worker in workers}) == 3
    assert len({worker.memory for worker in workers}) == 1


def test_monolithic_has_no_attention_workers() -> None:
    """The one worker brings both roles, so the gateway waits for one of each."""
    stack = plan(ServeOptions("m", monolithic=True, attention_memory="1GiB"), FOLDER)
    assert all(isinstance(worker, ComputeConfig) and worker.monolithic for worker in stack.workers)
    assert {worker.attention_memory for worker in stack.workers if isinstance(worker, ComputeConfig)} == {1 << 30}
    assert (stack.gateway.compute_workers, stack.gateway.attention_workers) == (1, 1)


def test_a_collector_of_traces_and_keys_are_for_every_process() -> None:
    """Else a trace would have holes, and whoever has no key would be turned away."""
    collector = "http://127.0.0.1:4318"
    stack = plan(ServeOptions("m", attention="2", http_port=8000, otlp_endpoint=collector, keys=Path("keys")), FOLDER)
    roles = [stack.gateway, *stack.workers, stack.http]
    assert [(role.otlp_endpoint, role.keys) for role in roles if role is not None] == [(collector, Path("keys"))] * 5


def test_stages_of_a_replica_follow_each_other() -> None:
    """One device is enough for all of them; of several, each runs the stage whose turn it is."""
    for given, devices in (("cpu", ["cpu"] * 2), ("cuda:0,cuda:1,cpu,cpu", ["cuda:0", "cuda:1", "cpu", "cpu"])):
        stack = plan(ServeOptions("m", compute=given, stages=2), FOLDER)
        workers = [worker for worker in stack.workers if isinstance(worker, ComputeConfig)]
        assert [worker.device for worker in workers] == devices
        assert [worker.stage for worker in workers] == [0, 1] * (len(devices) // 2)
        assert {worker.stages for worker in workers} == {2}
        assert len({worker.listen for worker in workers}) == stack.gateway.compute_workers == len(devices)


def test_pinned_workers_share_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has as many as the others, and a configuration file can say them as ranges."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3, 6, 7, 8})
    workers = plan(ServeOptions("m", attention="2", pin=True), FOLDER).workers
    assert [worker.cores for worker in workers] == [(0, 1), (2, 3), (6, 7)]
    assert load(AttentionConfig, flags={"cores": "0-2,7"}, environ={}).cores == (0, 1, 2, 7)
    for wrong in ("1-", "a", "", "-1", "3-x"):
        with pytest.raises(ConfigError, match="attention: cores is"):
            load(AttentionConfig, flags={"cores": wrong}, environ={})


def test_what_the_scheduler_is_told_reaches_the_gateway() -> None:
    """And what is not said is the gateway's own default."""
    told = {
        "max_batch_tokens": 256,
        "max_sequences": 32,
        "max_waiting": 8,
        "policy": "priority",
        "block_size": 16,
        "prefix_cache": False,
    }
    gateway = plan(ServeOptions("m", **told), FOLDER).gateway  # type: ignore[arg-type]  # of several types
    assert {name: getattr(gateway, name) for name in told} == told
    default = plan(ServeOptions("m"), FOLDER).gateway
    assert (default.policy, default.prefix_cache, default.block_size) == ("fcfs", True, 64)


def test_keys_are_everybodys_and_flows_the_compute_workers() -> None:
    """What isn't said stays as it was."""
    stack = plan(ServeOptions("m", keys=Path("k"), encrypt="control", flows=3), FOLDER)
    assert {(each.used_keys, each.encrypts_links) for each in (stack.gateway, *stack.workers)} == {(Path("k"), False)}
    assert [worker.flows for worker in stack.workers if isinstance(worker, ComputeConfig)] == [3]
    assert plan(ServeOptions("m"), FOLDER).gateway.used_keys is None


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_threads_do_not_exceed_the_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Unless there are more workers than cores: each needs one."""
    monkeypatch.setattr("pannier.cli.stack.host_cores", lambda: cores)
    workers = plan(ServeOptions("m", attention="2"), FOLDER).workers
    assert sum(worker.threads or 0 for worker in workers) <= max(cores, len(workers))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"compute": "gpu"}, "--compute is 'gpu'; it must be devices such as cpu or cuda:0,cuda:1"),
        ({"attention": "0"}, "--attention is 0; it must be 1 to 64"),
        ({"attention": "cpu,"}, "--attention is 'cpu,'"),
        ({"attention": "2", "monolithic": True}, "--attention 2 and --monolithic exclude each other"),
        ({"compute": "cpu,cpu", "monolithic": True}, "--compute cpu,cpu has several devices; --monolithic runs on one"),
        ({"lanes": 0}, "compute: lanes is 0; it must be greater than or equal to 1"),
        ({"block_size": 7}, "gateway: block_size is 7; it must be 16, 32 or 64"),
        ({"policy": "lifo"}, "gateway: policy is 'lifo'; it must be 'fcfs' or 'priority'"),
        ({"max_waiting": 0}, "gateway: max_waiting is 0; it must be greater than 0"),
        ({"max_sequences": 0}, "gateway: max_sequences is 0; it must be greater than 0"),
        ({"max_batch_tokens": -1}, "gateway: max_batch_tokens is -1; it must be greater than 0"),
        ({"attention_memory": "lots"}, "attention: memory is 'lots'"),
        ({"encrypt": "all"}, "encrypt is 'all', which needs keys"),
        ({"emulate_rate": "1,1,1"}, "--emulate-rate is 1,1,1; it must be one factor, or one for each of 1 workers"),
        ({"emulate_compute": "1,2,3"}, "compute: emulate_compute is"),
        ({"emulate_delay": 1.0, "monolithic": True}, "--emulate-delay 1: --monolithic has no links that"),
        ({"pin": True, "attention": "64"}, "--pin gives each of 65 workers a core of its own, and there are"),
        ({"stages": 0}, "--stages is 0; it must be 1 to 64"),
        ({"stages": 2, "compute": "cpu,cpu,cpu"}, "--compute cpu,cpu,cpu is 3 devices, no multiple of --stages 2"),
        ({"stages": 2, "monolithic": True}, "a monolithic worker runs the whole model"),
        ({"stages": 2, "emulate_compute": "5"}, "emulate_compute stands in for a whole model"),
        ({"heads_split": "5;3"}, "gateway: heads_split is '5;3'"),
    ],
)
def test_a_bad_option_gets_one_sentence(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(ServeOptions("m", **options), FOLDER)  # type: ignore[arg-type]  # wrong on purpose
    assert sentence in str(caught.value)


def test_what_is_emulated_reaches_the_workers_that_emulate_it() -> None:
    """A rate for each attention worker, or one for all; and what goes into a file comes back from it."""
    stack = plan(
        ServeOptions("m", attention="2", emulate_compute="40,5", emulate_delay=3.0, emulate_rate="1,0.5"), FOLDER
    )
    compute, *attention = stack.workers
    assert isinstance(compute, ComputeConfig)
    assert (compute.emulate_compute, compute.emulate_rate) == ((40.0, 5.0), 1.0)
    for worker, rate in zip(attention, (1.0, 0.5), strict=True):
        assert isinstance(worker, AttentionConfig)
        assert (worker.emulate_rate, worker.emulate_delay, worker.emulate_bandwidth) == (rate, 3.0, None)
    assert load(ComputeConfig, flags=tomllib.loads(to_toml(compute)), environ={}) == compute
    (worker,) = plan(ServeOptions("m", monolithic=True, emulate_rate="0.5"), FOLDER).workers
    assert worker.emulate_rate == 0.5
