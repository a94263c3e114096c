"""Commands and snippets of README and docs. Goal: what is written there works as written.

Method: commands are taken out of the code blocks; their options must be known to the command line. JSON and
Python of docs/clients.md are decoded and compiled; the examples are run against a `rigbook up`.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rigbook_schemas.wire import Malformed, decode

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.nats]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "client" / "README.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
START_SECONDS_MAX = 60.0


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text()) if language in languages]


def commands() -> list[str]:
    """Every `rigbook ...` line of a shell block, without prompt, comment and redirection."""
    found = []
    for page in PAGES:
        for text in blocks(page, "sh", "bash", "console", "shell"):
            for line in text.replace("\\\n", " ").splitlines():
                words = line.strip().removeprefix("$ ")
                if words.startswith("rigbook "):
                    found.append(re.split(r"\s+[|>&#]", words)[0])
    return sorted(set(found))


def run(words: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, **more)


@pytest.mark.parametrize("line", commands() or ["rigbook --help"])
def test_a_written_command_exists_with_its_options(line: str) -> None:
    words = shlex.split(line)[1:]
    own = words[: words.index("--")] if "--" in words else words
    path = [word for word in own[:2] if re.fullmatch(r"[a-z]+", word)]
    # `rigbook gpu list` has two words of command, `rigbook stop chat` one
    for length in (2, 1, 0):
        done = run([sys.executable, "-m", "rigbook", *path[:length], "--help"])
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    for word in own:
        option = word.partition("=")[0]
        if re.fullmatch(r"--?[a-z][a-z-]*", option):
            assert re.search(rf"(^|[\s,/]){re.escape(option)}\b", done.stdout), (
                f"{option} is not in the help of {path}"
            )


def test_snippets_of_the_client_page() -> None:
    page = ROOT / "docs" / "clients.md"
    (body,) = blocks(page, "json")
    record = decode(1, "rig.demand.demo", 0, body.encode())
    assert not isinstance(record.data, Malformed), record.data
    assert record.kind == "demand.raised"
    for text in blocks(page, "python"):
        compile(text, str(page), "exec")


# -- a running Rigbook ------------------------------------------------------------------------------


class Up:
    """A `rigbook up` as a process, and commands against it."""

    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RIGBOOK_")},
            "RIGBOOK_DATA": str(self.data),
            "RIGBOOK_PROJECT": "lab",
            "RIGBOOK_OWNER": "ada",
        }
        self.output = folder / "up.log"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rigbook", "up", "--port", "0", "--gpus", "sim:4xRTX4090", "--node", "lab",
                 "--engine", "process", "--heartbeat", "0.3"],
                stdout=output, stderr=output, env=self.environment, cwd=ROOT, start_new_session=True,
            )  # fmt: skip
        self.until((self.data / "context.json").exists, "up")
        self.url: str = json.loads((self.data / "context.json").read_text())["url"]

    def until(self, true: Any, what: str, seconds: float = START_SECONDS_MAX) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := true()):
            assert time.monotonic() < deadline, f"{what} did not happen: {self.output.read_text()}"
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.1)
        return found

    def __call__(self, *words: str, code: int = 0) -> str:
        done = run([sys.executable, "-m", "rigbook", *words], env=self.environment, cwd=ROOT)
        assert done.returncode == code, (
            f"rigbook {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done.stdout + done.stderr

    def json(self, *words: str, code: int = 0) -> Any:
        own = words.index("--") if "--" in words else len(words)  # what follows is somebody else's
        return json.loads(self(*words[:own], "--json", *words[own:], code=code))

    def phase(self, name: str) -> str:
        phase: str = self.json("show", name)["demand"]["phase"]
        return phase


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    from rigbook.leavings import end_leavings

    it = Up(tmp_path_factory.mktemp("up"))
    yield it
    it.process.send_signal(signal.SIGINT)
    code = it.process.wait(60)
    end_leavings(it.data)
    assert code == 0, it.output.read_text()
    for name in ("placer", "reaper", "agent", "ledger", "bus"):
        assert re.search(rf"^{name} +stopped", it.output.read_text(), re.MULTILINE), it.output.read_text()
    assert not (it.data / "context.json").exists()


def test_doctor_finds_everything_in_order(up: Up) -> None:
    up.until(lambda: up.json("node", "list")["items"], "the node joins")
    told = up.json("doctor")
    assert told["healthy"], told
    assert {"bus", "stream", "ledger", "audit", "placer", "reaper", "node lab", "drift"} <= {
        c["name"] for c in told["checks"]
    }


def test_a_second_up_is_refused(up: Up) -> None:
    assert "already_running" in up("up", "--port", "0", "--gpus", "sim:1xT4", code=6)


def test_submit_logs_show_and_who(up: Up) -> None:
    demand = up.json(
        "submit",
        "--gpu",
        "24GB:2",
        "--name",
        "talk",
        "--",
        "sh",
        "-c",
        "echo hello; sleep 1; echo bye; exit 3",
    )["demand"]
    assert "hello\nbye\n" in up("logs", "-f", demand)
    up.until(lambda: up.phase(demand) == "ended", "it ends")
    story = up.json("show", demand)
    assert [event["kind"] for event in story["events"]] == [
        "demand.raised",
        "bound",
        "started",
        "exited",
        "released",
    ]
    assert story["demand"]["verdict"] == "application_exit"
    assert "exit code 3" in up("explain", "talk")
    card = story["demand"]["cards"][0]
    (tenure,) = up.json("who", card)["items"]
    assert (tenure["demand"], tenure["owner"], tenure["released"] != "") == (demand, "ada", True)
    assert (
        demand in up("who", card, "--at", story["demand"]["since"].replace("Z", "+00:00"))
        or tenure["released"]
    )
    assert "before_record" in up("who", card, "--at", "2020-01-01 00:00", code=4)


def test_plan_apply_twice_and_stop(up: Up) -> None:
    file = str(ROOT / "examples" / "embed.yaml")
    assert all(item["fits"] for item in up.json("plan", "-f", file)["items"])
    first = up.json("apply", "-f", file)["items"]
    assert [item["outcome"] for item in first] == ["raised", "raised"]
    assert [item["outcome"] for item in up.json("apply", "-f", file)["items"]] == ["unchanged", "unchanged"]
    assert "spec_differs" in up(
        "deploy", "embed", "--gpu", "9GB", "--project", "search", "--command", "sleep 9", code=6
    )
    up.until(lambda: up.phase("embed") == "running", "it runs")
    for name in ("embed", "rerank"):
        assert up.json("stop", name, "--wait")["phase"] == "ended"


def test_rules(up: Up) -> None:
    up("gpu", "quarantine", "lab/3", "--reason", "ECC errors")
    assert up.json("gpu", "list")["items"][3]["status"] == "quarantined"
    up("gpu", "restore", "lab/3")
    up("node", "cordon", "lab")
    assert up.json("node", "list")["items"][0]["status"] == "cordoned"
    up("node", "uncordon", "lab")
    up("gpu", "mode", "lab/2", "time-slice")
    assert up.json("gpu", "list")["items"][2]["mode_pinned"]
    up("gpu", "mode", "lab/2", "any")
    up("quota", "set", "lab", "48GB")
    assert {row["project"]: row["quota_bytes"] for row in up.json("quota", "list")["items"]}[
        "lab"
    ] == 48 * 1024**3
    up("quota", "set", "lab", "none")
    assert "nope" in up("gpu", "mode", "nope", "exclusive", code=4)


def test_what_can_never_be_and_what_must_wait(up: Up, tmp_path: Path) -> None:
    never = tmp_path / "never.yaml"
    text = (ROOT / "examples" / "next.yaml").read_text()
    never.write_text(text.replace("memory: 20GB", "memory: 200GB"))
    assert "capacity_never" in up("plan", "-f", str(never), code=7)
    up("submit", "--gpu", "24GB:4", "--name", "all", "--", "sleep", "60")
    up.until(lambda: up.phase("all") == "running", "it runs")
    waits = tmp_path / "waits.yaml"
    waits.write_text(text)
    assert "exclusive_held" in up("plan", "-f", str(waits), code=10)
    assert up.json("stop", "all", "--wait")["phase"] == "ended"


def test_a_killed_part_comes_back(up: Up) -> None:
    context = json.loads((up.data / "context.json").read_text())
    os.kill(context["parts"]["placer"], signal.SIGKILL)
    up.until(
        lambda: (
            json.loads((up.data / "context.json").read_text())["parts"].get("placer")
            not in (None, context["parts"]["placer"])
        ),
        "a new placer",
    )
    up.until(lambda: up.json("doctor", code=0)["healthy"], "healthy again")


# -- examples ---------------------------------------------------------------------------------------


def test_plain_nats_asks_for_a_card(up: Up) -> None:
    done = run([sys.executable, "examples/plain_nats_demand.py", up.url], cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^plain-\w+ is event \d+ of RIG_LEDGER$", done.stdout, re.MULTILINE)
    assert re.search(r"^ended +GPU-", done.stdout, re.MULTILINE)


def test_a_request_is_answered_with_the_acknowledgement(up: Up) -> None:
    """What docs/clients.md does with `nats request`, through nats-py."""
    import asyncio

    import nats

    async def go() -> dict[str, Any]:
        bus = await nats.connect(up.url)
        (body,) = blocks(ROOT / "docs" / "clients.md", "json")
        reply = await bus.request("rig.demand.demo", body.encode(), timeout=5)
        await bus.close()
        answer: dict[str, Any] = json.loads(reply.data)
        return answer

    ack = asyncio.run(go())
    assert ack["stream"] == "RIG_LEDGER"
    up.until(lambda: up.phase("hello-1") == "ended", "the demand of the docs ends")


def test_the_webhook_gets_everything_once_it_answers(up: Up) -> None:
    # Goal: nothing lost, nothing acknowledged before a 2xx. Method: the hook refuses the first post, and the
    # subscriber is started anew in the middle.
    hook = Hook()
    environment = {**up.environment, "RIGBOOK_WEBHOOK": hook.url, "NATS_URL": up.url}

    def subscriber() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "examples/webhook_subscriber.py"], env=environment, cwd=ROOT)

    first = subscriber()
    try:
        time.sleep(2)  # its consumer begins at "new"
        up("submit", "--gpu", "8GB", "--name", "one", "--", "true")
        up.until(
            lambda: any(re.match(r"one-\w+ ended", text) for text in hook.texts), "the end of one is posted"
        )
    finally:
        first.terminate()
        first.wait(10)
    up("submit", "--gpu", "8GB", "--name", "two", "--", "false")  # nobody listens
    up.until(lambda: up.phase("two") == "ended", "two ends")
    second = subscriber()
    try:
        up.until(
            lambda: any(re.match(r"two-\w+ failed", text) for text in hook.texts),
            "the failure of two is posted",
        )
    finally:
        second.terminate()
        second.wait(10)
        hook.close()
    assert hook.refused == 1
    assert sum(text.startswith("one-") and " started" in text for text in hook.texts) == 1


class Hook:
    """A chat's webhook: refuses the first post, takes the rest."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.refused = 0
        hook = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if not hook.refused:
                    hook.refused += 1
                    self.send_response(503)
                else:
                    hook.texts.append(body["text"])
                    self.send_response(204)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                del args

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
