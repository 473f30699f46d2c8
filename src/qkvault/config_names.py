"""Names of settings as people write them: which one was meant, and what those of LMCache are called here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Final

# Keys that users of LMCache know: what ours is called (None: there is none), and what else differs.
LMCACHE_KEYS: Final[dict[str, tuple[str | None, str]]] = {
    "lmcache_instance_id": ("instance_id", ""),
    "local_cpu": ("hot_cache", ""),
    "max_local_cpu_size": ("ram_bytes", "in bytes, where theirs was in GB: 5.0 becomes 5GiB"),
    "local_disk": ("disk_path", "a plain path, without file://"),
    "max_local_disk_size": ("disk_bytes", "in bytes, where theirs was in GB: 5.0 becomes 5GiB"),
    "save_unfull_chunk": ("save_partial_chunks", ""),
    "save_decode_cache": ("save_decode", ""),
    "mp_transfer_intermediate_tensors": ("transfer_intermediate_tensors", ""),
    "pre_caching_hash_algorithm": ("hash_algorithm", ""),
    "min_retrieve_tokens": ("min_hit_tokens", ""),
    "pin_timeout_sec": ("lease_seconds", ""),
    "blocking_timeout_secs": ("load_deadline_seconds", ""),
    "enable_kv_events": ("events_endpoint", "where to publish them; those for vLLM follow its own kv_events_config"),
    **dict.fromkeys(("remote_url", "remote_serde", "enable_p2p", "enable_pd", "pd_role"), (None, "")),
    **dict.fromkeys(("enable_blending", "use_layerwise", "enable_controller", "extra_config"), (None, "")),
    **dict.fromkeys(("enable_async_loading", "lookup_timeout_ms", "pin_check_interval_sec"), (None, "")),
    **dict.fromkeys(("py_enable_gc", "error_handling"), (None, "")),
}


def explain_unknown(name: str, spelled: Mapping[str, str]) -> str:
    """What the user should have written instead of ``name``. ``spelled`` gives each setting as its source has it."""
    name = name.strip().lower().replace("-", "_")
    if name in LMCACHE_KEYS:
        ours, note = LMCACHE_KEYS[name]
        if ours is None:
            return f"LMCache's {name} is not supported here; remove it"
        return f"LMCache's {name} is called {spelled[ours]} here" + (f", {note}" if note else "")
    return nearest(name, spelled)


def nearest(name: str, known: Mapping[str, str]) -> str:
    """A hint at the one of ``known`` that ``name`` is most like."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {known[near[0]]!r}?" if near else f"expected one of {', '.join(known.values())}"
