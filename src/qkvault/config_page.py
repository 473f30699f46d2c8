"""The page docs/config.md, out of the schema."""

from __future__ import annotations

from typing import Final, get_args

import msgspec

from qkvault.config import Config
from qkvault.config_names import LMCACHE_KEYS
from qkvault.units import format_size


def schema_markdown() -> str:
    """The page docs/config.md."""
    settings = []
    for name, field in ((field.name, field) for field in msgspec.structs.fields(Config)):
        meta = get_args(field.type)[1]
        is_size = name.endswith("_bytes") and field.default is not None
        default = format_size(field.default) if is_size else str(field.default)
        if isinstance(field.default, bool):
            default = default.lower()
        shown = f"`{default}`" if field.default not in {None, ""} else "empty"
        examples = f" For example {', '.join(f'`{example}`' for example in meta.examples)}." if meta.examples else ""
        settings.append(f"| `{name}` | {shown} | {meta.description}{examples} |")
    others = [
        f"| `{theirs}` | {f'`{ours}`' if ours else 'not supported'} | {note} |"
        for theirs, (ours, note) in LMCACHE_KEYS.items()
    ]
    return _PAGE.format(settings="\n".join(settings), lmcache="\n".join(others))


_PAGE: Final = """\
# Settings

Generated from `qkvault/config.py` by `make docs`.

The same names work everywhere. A later line wins over an earlier one:

| source | how `ram_bytes` is written |
|---|---|
| YAML file that `QKVAULT_CONFIG` names | `ram_bytes: 8GiB` |
| environment | `QKVAULT_RAM_BYTES=8GiB` |
| vLLM's `kv_connector_extra_config` | `"qkvault.ram_bytes": "8GiB"` (keys without the prefix are not ours) |
| command line | `qkvault config show --set ram_bytes=8GiB` |

Sizes are bytes, or a number with kB, MB, GB, TB (powers of ten), KiB, MiB, GiB or TiB (of two). Durations are seconds,
or a number with us, ms, s, m or h. Booleans are true, yes, on, 1, false, no, off or 0. A setting that is unknown, that
cannot be read or that is impossible stops the start with a message; `qkvault config show` prints what is in force and
where each value came from. `qkvault config validate FILE` checks a file, and what it names on this machine, as
`qkvault serve` would.

| setting | default | meaning |
|---|---|---|
{settings}

## Coming from LMCache

`chunk_size` and `cache_policy` are the same. A key of LMCache is refused with the name of ours:

| LMCache | QKVault | difference |
|---|---|---|
{lmcache}
"""
