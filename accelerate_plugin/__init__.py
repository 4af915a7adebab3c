"""ya-fsdp under Hugging Face accelerate: ``accelerate launch --fsdp_ya_fsdp_enabled true SCRIPT`` and nothing else.

Importing this package must stay cheap and must not import torch: the interpreter start-up hook lives in
``accelerate_plugin.startup``, so Python runs this file first. Everything heavier is imported on use.
"""

__all__ = ["install"]


def install() -> None:
    """Registers the hooks on accelerate in this process, whether or not the start-up files are installed.

    Call it before ``accelerate``'s state is created (before ``Accelerator()`` or ``TrainingArguments()``). The hooks
    take effect only where ``FSDP_YA_FSDP_ENABLED`` is truthy or the launch flag is given.
    """
    from accelerate_plugin.startup import register_hooks

    register_hooks()
