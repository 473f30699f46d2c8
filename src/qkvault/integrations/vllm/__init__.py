"""QKVault under stock vLLM: ``--kv-transfer-config '{"kv_connector": "QKVaultConnector", "kv_role": "kv_both"}'``."""

from __future__ import annotations

from typing import Final

from qkvault.logs import get_logger

SUPPORTED: Final = "0.32"  # the vLLM whose connector interface we implement


def register() -> None:
    """Make the connector known by name. The entry point of ``vllm.general_plugins``; harmless when called again.

    vLLM calls it in each of its processes, whether the connector is wanted or not, so that it never raises.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # only under vLLM

        KVConnectorFactory.register_connector(
            "QKVaultConnector", "qkvault.integrations.vllm.connector", "QKVaultConnector"
        )
    except ValueError:  # registered before, in this process
        return
    except (ImportError, AttributeError) as error:
        get_logger("vllm").warning("connector_not_registered", error=error)
