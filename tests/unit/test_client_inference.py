"""Inference engines as data: `deploy --model M --engine E --gpu G` makes a whole container contract.

Goal: each shipped engine gives a component whose memory comes from the allotment; a user's file wins; what is wrong is
told before anything is sent. Method: presets and contracts directly, and the commands with no bus behind them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from rigbook.commands.deploy import _component, name_of
from rigbook.failures import Invalid, Unusable
from rigbook.flags import Flags, demand_of
from rigbook.inference import contract_of, known_engines, preset_of
from rigbook_schemas.placeholders import problems
from rigbook_schemas.values import GIB, Port, Workload

QWEN = "Qwen/Qwen2.5-7B-Instruct"


@pytest.fixture(autouse=True)
def _nobodys_own_engines(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("RIGBOOK_ENGINES", raising=False)


def made(engine: str, *, port: list[str] | None = None, **more: object):
    given = {"model": QWEN, "args": "", "health": "", "image": "", "command": "", "port": port, "env": None}
    return _component(engine, **{**given, **more})  # type: ignore[arg-type]


def filled(component, *, memory_gib: int = 24, card_gib: int = 48, gpu_count: int = 1):
    return contract_of(
        component, memory_bytes=memory_gib * GIB, card_memory_bytes=card_gib * GIB, gpu_count=gpu_count
    )


def test_the_seeds_command_gives_the_full_contract() -> None:
    component = made("vllm", port=["8000"])
    contract = filled(component, memory_gib=24, card_gib=48)
    c = contract.component
    assert c.command == (
        f"--model={QWEN}",
        "--host=0.0.0.0",
        "--port=8000",
        "--gpu-memory-utilization=0.500",
        "--tensor-parallel-size=1",
    )
    assert c.image.startswith("vllm/vllm-openai:")
    assert (c.ports, c.probe.kind, c.probe.path, c.probe.port) == (
        (Port(port=8000, host_port=8000),),
        "http",
        "/health",
        8000,
    )
    assert (c.startup.startup_seconds_max, c.shm_bytes, c.starts_alone) == (1800.0, 8 * GIB, True)
    assert [(m.source, m.target, m.read_only) for m in c.mounts] == [
        ("<the node's weights folder>", "/models", False)
    ]
    assert c.env == {"HF_HOME": "/models/hf"}
    told = dict(contract.lines())
    assert told["memory"] == "24.0 GiB of 48.0 GiB on each card: memory_share 0.500"
    assert told["health"] == "GET /health on port 8000, every 10 s, 3 failures in a row"
    assert told["startup"] == "GET /health on port 8000, ready within 30 min"
    assert told["ports"] == "8000 as port 8000 of the node"


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", "--gpu-memory-utilization=0.500"),
        ("sglang", "--mem-fraction-static=0.450"),
        ("tgi", "--cuda-memory-fraction=0.500"),
        ("ollama", f"OLLAMA_GPU_OVERHEAD={24 * GIB}"),
        ("llama.cpp", "-ngl"),
    ],
)
def test_each_engine_with_its_memory_flag(engine: str, words: str) -> None:
    component = made(engine)
    assert problems(component) == []
    c = filled(component).component
    assert words in (*c.command, *(f"{k}={v}" for k, v in c.env.items()))
    assert "{" not in "".join((*c.command, *c.env.values()))
    assert (c.fill, c.starts_alone, c.probe is not None, c.startup is not None) == (True, True, True, True)


def test_all_shipped_engines_are_known_and_whole() -> None:
    assert known_engines() == ["custom", "llama.cpp", "ollama", "sglang", "tgi", "vllm"]
    for engine in known_engines():
        preset = preset_of(engine)
        assert preset.name == engine
        assert preset.memory, "each says how its memory is made"


def test_ollama_pulls_the_model_before_it_counts_as_ready() -> None:
    startup = made("ollama", model="qwen2.5:7b").startup
    assert (startup.kind, startup.command) == ("exec", ("ollama", "pull", "qwen2.5:7b"))


def test_two_cards_are_served_by_tensor_parallelism() -> None:
    c = filled(made("vllm"), gpu_count=2).component
    assert "--tensor-parallel-size=2" in c.command


def test_without_a_card_the_placeholders_stay_and_it_says_so() -> None:
    contract = contract_of(made("vllm"), memory_bytes=24 * GIB, card_memory_bytes=None, gpu_count=1)
    assert not contract.filled
    assert "--gpu-memory-utilization={memory_share}" in contract.component.command
    assert "filled in on the node" in contract.memory


def test_a_card_that_it_might_get_gives_the_figures_for_now() -> None:
    contract = contract_of(
        made("vllm"), memory_bytes=24 * GIB, card_memory_bytes=48 * GIB, gpu_count=1, assumed=True
    )
    assert not contract.filled
    assert "--gpu-memory-utilization=0.500" in contract.component.command
    assert contract.memory.endswith("if it gets a card of that size; made anew on the node")


def test_more_arguments_image_env_and_health() -> None:
    c = made(
        "vllm",
        args="--max-model-len 8192 --dtype half",
        image="mine:1",
        env=["HF_HUB_OFFLINE=1"],
        health="/ping",
    )
    assert c.command[-4:] == ("--max-model-len", "8192", "--dtype", "half")
    assert (c.image, c.env["HF_HUB_OFFLINE"], c.env["HF_HOME"], c.probe.path) == (
        "mine:1",
        "1",
        "/models/hf",
        "/ping",
    )


@pytest.mark.parametrize(
    ("text", "port"), [("8000", (8000, 8000)), ("8000:0", (8000, 0)), ("80:8080", (80, 8080))]
)
def test_a_port_alone_is_the_nodes_port_too(text: str, port: tuple[int, int]) -> None:
    (found,) = made("vllm", port=[text]).ports
    assert (found.port, found.host_port) == port
    assert made("vllm").ports == (Port(port=8000, host_port=0),), "without one the node chooses"


def test_custom_is_whatever_the_image_does() -> None:
    c = made("custom", image="mine:1", command="serve --bytes {memory_bytes}", model="")
    assert filled(c).component.command == ("serve", "--bytes", str(24 * GIB))
    assert (c.mounts, c.starts_alone) == ((), False)


def test_a_users_file_names_only_what_differs(tmp_path, monkeypatch) -> None:
    own = tmp_path / "engines"
    own.mkdir()
    (own / "vllm.yaml").write_text(
        "extends: vllm\nimage: registry.local/vllm:1\nenv: {HF_TOKEN_PATH: /models/token}\n"
    )
    (own / "fast.yaml").write_text("extends: vllm\nname: fast\nstartup: 5m\n")
    monkeypatch.setenv("RIGBOOK_ENGINES", str(own))
    assert "fast" in known_engines()
    c = made("vllm")
    assert (c.image, c.env) == (
        "registry.local/vllm:1",
        {"HF_HOME": "/models/hf", "HF_TOKEN_PATH": "/models/token"},
    )
    fast = made("fast")
    assert (fast.image, fast.startup.startup_seconds_max) == ("registry.local/vllm:1", 300.0)
    assert made(str(own / "fast.yaml")) == fast, "a file named on the command line"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a list", "expected fields"),
        ("name: x\nimgae: y\n", "unknown field `imgae`"),
        ("extends: nothing\n", "extends 'nothing', which is none"),
        ("extends: mine\n", "extends 'mine'"),
        ("name: x\nimage: i\ncommand: ['{memory_shar}']\n", "{memory_shar} is no placeholder"),
        ("name: x\nimage: i\nstartup: soon\n", "startup"),
        ("name: x\nimage: i\nshm: much\n", "shm"),
        ("{", "engine file"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path, text: str, words: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(Invalid) as told:
        made(str(file))
    assert words in str(told.value)


def test_wrong_flags() -> None:
    with pytest.raises(Invalid, match=r"expected custom, llama\.cpp, ollama"):
        made("vlm")
    with pytest.raises(Unusable, match="needs a model"):
        made("vllm", model="")
    with pytest.raises(Unusable, match="has no image"):
        made("custom")
    with pytest.raises(Unusable, match="one port"):
        made("vllm", port=["1", "2"])
    with pytest.raises(Unusable, match="has a command of its own"):
        made("vllm", command="serve")
    with pytest.raises(Unusable, match="an engine's"):
        made("", model=QWEN)
    assert made("", model="") is None


def test_the_name_comes_from_the_model() -> None:
    assert name_of(QWEN) == "qwen2-5-7b-instruct"
    assert name_of("qwen2.5:7b") == "qwen2-5-7b"
    assert name_of("///") == "service"


def test_the_demand_prefers_a_node_that_has_the_weights() -> None:
    component = made("vllm", port=["8000"])
    flags = Flags(
        workload=Workload.SERVICE, gpu="24GB", project="nlp", owner="ada", name=name_of(QWEN), component=component,
        weights=QWEN, priority="high", headroom="1.25", idle_max="2h", restart="on-failure",
    )  # fmt: skip
    spec = demand_of(flags)
    assert (spec.resources.weights, spec.resources.headroom, spec.priority) == (QWEN, 1.25, 75)
    assert (spec.idle_seconds_max, spec.components) == (7200.0, (component,))
    with pytest.raises(Invalid, match="--headroom"):
        demand_of(msgspec.structs.replace(flags, headroom="9"))


def test_the_files_are_in_the_wheel() -> None:
    import rigbook.inference

    folder = Path(rigbook.inference.__file__).parent / "engines"
    assert len(list(folder.glob("*.yaml"))) == 6
