"""QueryTap by itself: what it shows, where, and what it leaves alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from qkvault.integrations.vllm.query_tap import QueryTap


class Impl:
    """What a backend's implementation is to a layer."""

    def forward(self, layer, query, key, *, output):
        return output.copy_(query + key)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_shows_what_attention_gets(device):
    """B416: the very tensor, on its device and before attention runs; what attention returns is returned."""
    layers, shown = {name: SimpleNamespace(impl=Impl()) for name in "ab"}, []
    tap = QueryTap(layers, lambda name, queries: shown.append((name, queries(), torch.equal(output, query))))
    query, key, output = (torch.full((3, 2, 4), value, device=device) for value in (2.0, 3.0, 0.0))
    assert layers["b"].impl.forward(None, query, key, output=output) is output
    assert (output == 5).all()
    ((name, seen, was_done),) = shown
    assert (name, seen is query, seen.device.type, was_done) == ("b", True, device, False)
    tap.close()
    tap.close()
    assert vars(layers["a"].impl) == vars(layers["b"].impl) == {}
