"""One directory, several models and several who ask: what is on disk is found by whom it was computed for."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

SALTS = [
    "../../secret-salt",
    "/tmp/secret-salt",
    "secret-salt/../..",
    "secret-salt\n\0%s{0}",
    "secret-salt\u202e" * 300,
]


def num_loaded(engine, prompt, **who):
    """How many tokens of ``prompt`` the engine loads when it is asked."""
    engine.forget_own_prefixes()
    request = engine.ask(prompt, **who)
    return sum(len(op.block_ids) for op in engine.loads_of(request.request_id)) * 16


@pytest.fixture
def start(toy, tiny_model, tmp_path):
    """Starts an engine over the one disk of this test, of the toy model or one with a byte of its weights changed."""
    engines = []
    retrained = tmp_path / "models" / Path(tiny_model).name

    def make(*, is_retrained=False, **settings):
        if is_retrained and not retrained.exists():
            shutil.copytree(tiny_model, retrained)
            weights = bytearray((retrained / "model.safetensors").read_bytes())
            weights[-3] ^= 1
            (retrained / "model.safetensors").write_bytes(weights)
        settings = {"qkvault.disk_path": str(tmp_path / "disk"), **settings}
        engines.append(toy.ToyEngine(str(retrained) if is_retrained else tiny_model, settings=settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    "other", [{"is_retrained": True}, {"qkvault.model_revision": "2"}], ids=["weights", "revision"]
)
def test_two_models_on_one_disk_never_hit_each_other(start, prompts, tmp_path, other):
    """B467: an engine that is restarted with other weights, or another revision, of one name and geometry."""
    prompt = prompts(300)
    fork = prompt[:160] + prompts(40)
    for options, is_known in (({}, False), (other, False), ({}, True), (other, True)):
        engine = start(**options)
        assert num_loaded(engine, fork) == (192 if is_known else 0)
        assert num_loaded(engine, prompt) == (288 if is_known else 160)
        engine.assert_texts()
        engine.move_to_disk()
        engine.assert_clean()
        engine.close()
    spaces = [path for path in (tmp_path / "disk").iterdir() if path.is_dir() and any(path.rglob("*.qkv"))]
    assert len(spaces) == 2


@pytest.mark.parametrize("salt", SALTS, ids=range(len(SALTS)))
def test_a_salt_is_no_path_and_is_shown_nowhere(start, prompts, log_lines, tmp_path, salt):
    """B468: whatever it holds, all files lie in the tier's directory; neither they, their names nor a log tell it."""
    logging.getLogger("qkvault").setLevel(logging.DEBUG)
    (tmp_path / "elsewhere").mkdir()
    disk = tmp_path / "elsewhere" / "disk"
    engine = start(**{"qkvault.disk_path": str(disk), "qkvault.log_level": "debug"})
    prompt = prompts(300)
    assert num_loaded(engine, prompt, cache_salt=salt) == 0
    engine.move_to_disk()
    assert num_loaded(engine, prompt, cache_salt=salt) == 288
    for other in ({}, {"cache_salt": "secret-salt"}, {"cache_salt": salt[:-1]}):
        assert num_loaded(engine, prompt, **other) == 0
    engine.move_to_disk()
    engine.assert_clean()
    engine.close()

    files = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    assert len([path for path in files if path.suffix == ".qkv"]) == 4 * 5
    assert {path.relative_to(tmp_path).parts[:2] for path in files} == {("elsewhere", "disk")}
    assert not Path("/tmp/secret-salt").exists()
    for path in tmp_path.rglob("*"):
        assert "secret" not in path.name
        assert path.is_dir() or b"secret" not in path.read_bytes()
    assert len(log_lines) > 20
    assert not [line for line in log_lines if "secret" in line]
