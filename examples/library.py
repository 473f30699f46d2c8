"""QKVault as a library: store the attention state in some blocks of paged tensors, and load it into others."""

import torch

from qkvault import CacheEngineBuilder, CacheKind, Config
from qkvault.engine import EngineMetadata
from qkvault.layout import ChunkLayout

layout = ChunkLayout(
    kind=CacheKind.KV, num_layers=2, num_heads=4, head_size=64, num_parts=2, dtype="float32",
    block_size=16, chunk_size=256, order="LBHNPD",
)  # fmt: skip
tensors = [torch.randn(128, 4, 16, 2 * 64) for _ in range(2)]  # one a layer: [blocks, heads, tokens, K then V]
metadata = EngineMetadata("my-model", "its revision", layout)  # part of every key
engine = CacheEngineBuilder.get_or_create("library", Config(ram_bytes=64 << 20), metadata, tensors)

tokens = list(range(1000))
engine.store(tokens, block_ids=range(63))  # they lie in blocks 0 to 62
print(engine.lookup(tokens), "of 1000 tokens are cached")  # 992: hits end with a whole block
is_there = engine.retrieve(tokens, block_ids=range(64, 127))  # bool, one for each token
assert is_there.sum() == 992
assert all(torch.equal(tensor[64:126], tensor[0:62]) for tensor in tensors)
CacheEngineBuilder.destroy("library")
