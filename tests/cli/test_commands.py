"""The commands as a person uses them, with real processes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.terminal import Started, Terminal, wait_for_end

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
READY = "pannier serves"


@pytest.fixture
def stack(terminal: Terminal, tiny_model: Path) -> Iterator[Started]:
    """A stack with two attention workers that takes requests."""
    options = ("--attention", "2", "--attention-memory", "64MiB", "--dtype", "float32")
    with terminal.start("serve", str(tiny_model), "--no-http", "--endpoint", terminal.endpoint, *options) as started:
        started.read_until(READY)
        yield started


def pid_of(terminal: Terminal, part: str) -> int:
    return next(pid for pid, command in terminal.processes().items() if part in command)


def test_a_running_stack_can_be_looked_at_and_talked_to(terminal: Terminal, stack: Started) -> None:
    """Status, completion, log-probabilities and errors, all from other processes; afterwards nothing is left."""
    status = json.loads(terminal.call("status", "--json").stdout)
    assert status["ready"]
    assert sorted(process["role"] for process in status["processes"]) == [
        "attention",
        "attention",
        "compute",
        "gateway",
    ]
    assert {process["pid"] for process in status["processes"]} < set(terminal.processes())
    table = terminal.call("status").stdout
    assert all(name in table for name in ("gateway", "compute-0", "attention-0", "attention-1", "float32"))

    looks = terminal.call("top", "--count", "2", "--interval", "0.2", "--json").stdout.splitlines()
    assert [len(json.loads(look)["lanes"]) for look in looks] == [2, 2]
    assert "attention-1" in terminal.call("top", "--count", "1", "--interval", "0.2").stdout

    options = ("--max-tokens", "8", "--temperature", "0", "--ignore-eos")
    text = terminal.call("complete", "abc", *options)
    assert (text.returncode, text.stderr) == (0, "")
    full = json.loads(terminal.call("complete", "abc", *options, "--logprobs", "2", "--json").stdout)
    assert text.stdout == full["text"] + "\n"
    assert (full["finish_reason"], len(full["tokens"]), len(full["logprobs"])) == ("length", 8, 8)
    assert all(token["logprob"] == token["top"][0]["logprob"] for token in full["logprobs"])
    shown = terminal.call("complete", "abc", *options, "--logprobs", "1").stdout.splitlines()
    assert [int(line.split()[0]) for line in shown[-8:]] == full["tokens"]

    refused = terminal.call("complete", "abc", "--max-tokens", "0")
    assert refused.returncode == 1
    assert refused.stderr.startswith("pannier: ")
    assert len(refused.stderr.splitlines()) == 1

    stack.process.send_signal(signal.SIGTERM)
    assert stack.end() == 0
    assert terminal.left() == []


def test_ctrl_c_during_generation_leaves_nothing(terminal: Terminal, stack: Started) -> None:
    """No process, socket or folder, though a request was in flight; its client is told."""
    with terminal.start("complete", "abc", "--max-tokens", "4000", "--ignore-eos") as client:
        assert client.output.read(1)
        stack.press_ctrl_c()
        assert stack.end() == 0
        assert client.end() == 1
    assert terminal.left() == []


def test_a_lost_process_ends_the_stack_and_is_named(terminal: Terminal, stack: Started) -> None:
    """In the last line, with an exit code that is not 0."""
    os.kill(pid_of(terminal, "compute-0.toml"), signal.SIGKILL)
    assert stack.end() == 1
    assert stack.lines[-1] == "pannier: compute-0 was ended by SIGKILL"
    assert terminal.left() == []


def test_a_killed_supervisor_takes_its_children_along(terminal: Terminal, stack: Started) -> None:
    """Nobody is left to stop them, so they notice by themselves."""
    children = terminal.processes().keys() - {stack.process.pid}
    os.kill(stack.process.pid, signal.SIGKILL)
    for pid in children:
        wait_for_end(pid)
    assert len(children) == 4
    assert terminal.processes().keys() <= {stack.process.pid}


def test_once_prints_a_completion_and_leaves(terminal: Terminal, tiny_model: Path) -> None:
    """Text on stdout, progress on stderr, no port taken, nothing left; attention in the compute process too."""
    ran = terminal.call("serve", str(tiny_model), "--monolithic", "--once", "abc", "--max-tokens", "5")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("\n")
    assert "loading" not in ran.stdout
    assert "compute-0: loading" in ran.stderr
    assert terminal.left() == []


def test_ctrl_c_while_loading_leaves_nothing(terminal: Terminal, tiny_model: Path, tmp_path: Path) -> None:
    """Without slices in the cache, loading takes long enough to be cut."""
    terminal.cache = tmp_path
    with terminal.start("serve", str(tiny_model), "--once", "abc") as started:
        started.read_until("compute-0: loading")
        started.press_ctrl_c()
        assert started.end() == 128 + signal.SIGINT
    assert terminal.left() == []


def test_a_busy_port_is_one_sentence(terminal: Terminal, tiny_model: Path) -> None:
    """The last line names it; the other processes end."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = terminal.call("serve", str(tiny_model), "--no-http", "--port", str(port))
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith(f"pannier: gateway: tcp://127.0.0.1:{port} is in use")
    assert "Traceback" not in ran.stderr
    assert terminal.left() == []


def test_a_folder_without_tokenizer_is_one_sentence(terminal: Terminal, tiny_model: Path, tmp_path: Path) -> None:
    mute = shutil.copytree(tiny_model, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    ran = terminal.call("serve", str(mute), "--once", "abc")
    assert ran.returncode == 1
    assert "has no tokenizer" in ran.stderr.splitlines()[-1]
    assert terminal.left() == []


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["serve", "/no/such/model"], 1, "pannier: the model folder '/no/such/model' does not exist"),
        (["serve", "random:llama-135m", "--compute", "gpu"], 1, "pannier: --compute is 'gpu'; it must be devices"),
        (["gateway", "--config", "/no/such/file"], 1, "pannier: can't read the configuration file /no/such/file"),
        (["attention", "--set", "size=3"], 1, "pannier: attention has no setting 'size'"),
        (["attention", "--set", "memory"], 2, "'memory' is not NAME=VALUE"),
        (["status", "--endpoint", "tcp://10.0.0.1:5151"], 1, "pannier: tcp://10.0.0.1:5151 can be reached from other"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)
def test_a_bad_command_gets_one_sentence(terminal: Terminal, arguments: list[str], code: int, sentence: str) -> None:
    """At once, before any process is started."""
    ran = terminal.call(*arguments)
    assert ran.returncode == code
    assert sentence in ran.stderr
    assert ran.stdout == ""
    assert "Traceback" not in ran.stderr


def test_debug_shows_where_an_error_came_from(terminal: Terminal) -> None:
    assert "Traceback" in terminal.call("--debug", "serve", "/no/such/model").stderr


@pytest.mark.parametrize("module", ["torch", "transformers", "pydantic", "structlog"])
def test_commands_that_only_talk_start_without_the_engine(module: str) -> None:
    """Only the client is imported, for a start that nobody notices."""
    code = (
        "import sys\nfrom pannier.cli import __main__, talk, status\nimport pannier.client\n"
        f"sys.exit({module!r} in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
