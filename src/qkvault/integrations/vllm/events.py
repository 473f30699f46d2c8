"""The store's events as vLLM's, for vLLM to publish with its own. Taken on the scheduler's thread: no file is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from qkvault.events import AllBlocksCleared, BlockRemoved, BlockStored, Translator
from qkvault.logs import RateLimited, get_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent

    from qkvault.config import Config
    from qkvault.store.driver import StoreDriver

_MAX_A_STEP: Final = 64  # events: one to two milliseconds, if all bring tokens
_log = get_logger("vllm.events")
_limited = RateLimited(_log)


def are_wanted(vllm_config: VllmConfig, config: Config) -> bool:
    """Whether vLLM is to publish the store's events with its own: if it publishes any, and the store does not.

    A server's store is everybody's: each of its engines would tell all the others' events again. That is said here.
    """
    told = vllm_config.kv_events_config
    if told is None or not told.enable_kv_cache_events:
        return False
    if config.address is not None:
        _log.warning("store_events_not_published", address=config.address, use="events_endpoint of the server")
    return config.address is None and not config.events_endpoint


class EngineEvents:
    """Events of one store, step by step."""

    def __init__(self, driver: StoreDriver) -> None:
        """Switch the store's events on: it tells what is here, then what changes."""
        from vllm.distributed import kv_events

        self._driver = driver
        self._vllm = kv_events
        self._translator = Translator()

    def take(self) -> list[KVCacheEvent]:
        """The next events.

        A reader that was late cannot be told so here: the message would void what vLLM has told of its own blocks.
        What has left the store meanwhile then counts as present until it comes and leaves again.
        """
        taken: list[KVCacheEvent] = []
        for _, event in self._translator.translate(self._driver.take_events(_MAX_A_STEP)):
            match event:
                case AllBlocksCleared():
                    _limited.warning("events_lost", effect="routers may count chunks that have left")
                case BlockRemoved(block_hashes=hashes, medium=medium):
                    taken.append(self._vllm.BlockRemoved(block_hashes=list(hashes), medium=medium))
                case BlockStored():
                    taken.append(self._of_stored(event))
        return taken

    def _of_stored(self, event: BlockStored) -> KVCacheEvent:
        return self._vllm.BlockStored(
            block_hashes=list(event.block_hashes),
            parent_block_hash=event.parent_block_hash,
            token_ids=list(event.token_ids),
            block_size=event.block_size,
            lora_id=None,
            medium=event.medium,
            lora_name=None,
        )
