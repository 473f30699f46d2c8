"""QKVault under stock vLLM: ``--kv-transfer-config '{"kv_connector": "QKVaultConnector", "kv_role": "kv_both"}'``."""

from __future__ import annotations


def register() -> None:
    """Make the connector known by name. The entry point of ``vllm.general_plugins``; harmless when called again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # only under vLLM

    try:
        KVConnectorFactory.register_connector(
            "QKVaultConnector", "qkvault.integrations.vllm.connector", "QKVaultConnector"
        )
    except ValueError:  # registered before, in this process
        return
