"""What the tests of the vLLM connector share: small models, the toy engine, and vLLM's settings for a small machine."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Read by vLLM when it is imported, or when an engine starts.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="0-1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
)

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 512, 64, 2, 4, 2, 32


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """A directory with a Llama of random weights, so large that each token of its text hangs on all before it."""
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(3)

    def weight(num_rows: int, num_columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(num_rows, num_columns, generator=random) * scale / num_columns**0.5

    weights = {
        "model.embed_tokens.weight": weight(VOCABULARY, WIDTH, WIDTH**0.5),
        "model.norm.weight": torch.ones(WIDTH),
        "lm_head.weight": weight(VOCABULARY, WIDTH, 4),
    }
    for layer in range(LAYERS):
        sizes = {
            "self_attn.q_proj": (HEADS * HEAD_SIZE, WIDTH, 2),
            "self_attn.k_proj": (KV_HEADS * HEAD_SIZE, WIDTH, 2),
            "self_attn.v_proj": (KV_HEADS * HEAD_SIZE, WIDTH, 3),
            "self_attn.o_proj": (WIDTH, HEADS * HEAD_SIZE, 3),
            "mlp.gate_proj": (2 * WIDTH, WIDTH),
            "mlp.up_proj": (2 * WIDTH, WIDTH),
            "mlp.down_proj": (WIDTH, 2 * WIDTH),
        }
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}{name}.weight": weight(*size) for name, size in sizes.items()}
        weights[f"{prefix}input_layernorm.weight"] = torch.ones(WIDTH)
        weights[f"{prefix}post_attention_layernorm.weight"] = torch.ones(WIDTH)
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def _sibling(name: str) -> ModuleType:
    """The module ``name`` of this folder, which is not a package."""
    full_name = f"qkvault_tests_vllm_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[full_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[full_name]


@pytest.fixture(scope="session")
def toy() -> ModuleType:
    """The module of the toy engine: ``text_of``, ``digests``, its sizes."""
    return _sibling("toy_engine")


@pytest.fixture
def toy_engine(toy, tiny_model) -> Iterator[Callable[..., object]]:
    """Starts toy engines, and closes them when the test is over."""
    engines = []

    def start(**options):
        engines.append(toy.ToyEngine(tiny_model, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def new_traffic(toy) -> Callable[..., object]:
    """Makes random traffic for a toy engine: ``Traffic`` of the module of that name."""
    return partial(_sibling("toy_traffic").Traffic, toy)


@pytest.fixture(scope="session")
def toy_queries() -> ModuleType:
    """The module of the toy engine's attention layers, whose queries are known."""
    return _sibling("toy_queries")


@pytest.fixture(autouse=True)
def _own_logs() -> Iterator[None]:
    """What a connector has done to our logger is undone: other tests listen at the root's."""
    import logging

    yield
    logger = logging.getLogger("qkvault")
    logger.handlers = [handler for handler in logger.handlers if handler.name != "qkvault"]
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


@pytest.fixture
def prompts() -> Callable[[int], list[int]]:
    """Prompts of that many tokens which share nothing, the same in each run of a test."""
    rng = random.Random(5)
    return lambda count: [rng.randrange(3, 97) for _ in range(count)]


@pytest.fixture
def log_lines(monkeypatch) -> Iterator[list[str]]:
    """Our log lines of the test, from limiters that have said nothing yet."""
    import logging

    from qkvault.capture import features
    from qkvault.integrations.vllm import connector, scheduler, worker
    from qkvault.logs import RateLimited, get_logger

    lines: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    for module, name in ((connector, "_limited"), (scheduler, "_log"), (worker, "_log"), (features, "_log")):
        monkeypatch.setattr(module, name, RateLimited(get_logger("vllm")))
    logger, keeper = logging.getLogger("qkvault"), Keeper()
    level = logger.level
    logger.addHandler(keeper)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(keeper)
    logger.setLevel(level)


@pytest.fixture(scope="session")
def real() -> ModuleType:
    """The module of stock vLLM's engines: ``RealEngine``, and the program it is in a process of its own."""
    return _sibling("real_engine")


@pytest.fixture(scope="session")
def server_process() -> type:
    """``Server`` of the module ``real_server``: ``qkvault serve`` in a process of its own."""
    return _sibling("real_server").Server


@pytest.fixture(scope="session")
def engine_process() -> type:
    """``Engine`` of the module ``real_server``: an engine in a process of its own that is told what to do."""
    return _sibling("real_server").Engine


def prompt_of(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 512) for _ in range(count)]


def many_prompts() -> list[list[int]]:
    """Forty prompts: of some length each, or with a stem that others share to some point, inside a chunk as a rule."""
    rng = random.Random(7)
    stems = [prompt_of(rng, 330), prompt_of(rng, 150)]
    shared = [rng.choice(stems)[: rng.randrange(20, 330)] + prompt_of(rng, rng.randrange(1, 60)) for _ in range(24)]
    return shared + [
        prompt_of(rng, length) for length in [1, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 200, 256, 300, 500, 20]
    ]


@pytest.fixture(scope="session")
def truth(real, tiny_model) -> dict[str, Any]:
    """What vLLM says without us: after forty prompts, and turn by turn in four talks. Its engine has ended."""
    prompts = many_prompts()
    engine = real.RealEngine(tiny_model, enable_prefix_caching=False)
    rng = random.Random(8)
    found = {"prompts": prompts, "texts": [engine.generate([prompt], 24)[0] for prompt in prompts], "talks": []}
    for _ in range(4):
        talk, turns = [], []
        for _ in range(4):
            talk = talk + prompt_of(rng, rng.randrange(20, 90))
            text = engine.generate([talk], 20)[0]
            turns.append((talk, text))
            talk = talk + text
        found["talks"].append(turns)
    engine.close()
    return found
