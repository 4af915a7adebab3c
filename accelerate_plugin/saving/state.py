"""``accelerator.save_state`` and ``load_state``: the whole folder is written aside and published at once."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accelerate_plugin.hooks import unless_asked
from accelerate_plugin.prepare import is_managed
from accelerate_plugin.saving.folder import check_complete, why_incomplete
from accelerate_plugin.saving.forms import form_of
from accelerate_plugin.saving.publication import publication
from accelerate_plugin.saving.ranks import on_rank_zero

__all__ = ["wrap_load_state", "wrap_save_state"]

Function = Callable[..., Any]
_NUMBERED = re.compile(r"checkpoint_(\d+)")


def wrap_save_state(original: Function) -> Function:
    """Saves safely; older checkpoints are removed only once the new one is there. A collective."""

    @unless_asked(original)
    def save_state(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        configuration = self.project_configuration
        automatic = configuration.automatic_checkpoint_naming
        if not any(is_managed(model) for model in self._models) or (output_dir is None and not automatic):
            return original(self, output_dir, *args, **kwargs)
        place, final, iteration = None, Path(output_dir or ""), configuration.iteration
        if automatic:
            place = Path(self.project_dir)
            final = place / "checkpoints" / f"checkpoint_{self.save_iteration}"
            if final.exists():
                raise ValueError(
                    f"{final} is there already; set accelerator.project_configuration.iteration to the number that the "
                    f"next checkpoint shall have (it is {iteration} now)"
                )
        facts = {"state_dict_type": form_of(self.state.fsdp_plugin), "num_processes": self.num_processes}
        try:
            with publication(final, place=place, facts=facts) as saving:
                configuration.automatic_checkpoint_naming = False
                try:
                    original(self, str(saving.aside), *args, **kwargs)
                finally:
                    configuration.automatic_checkpoint_naming = automatic
        except Exception:
            configuration.iteration = iteration
            raise
        if automatic and configuration.total_limit is not None and dist.get_rank() == 0:
            for _, folder in _numbered(final.parent)[: -configuration.total_limit]:
                shutil.rmtree(folder, ignore_errors=True)
        return final

    return save_state


def wrap_load_state(original: Function) -> Function:
    """Loads complete checkpoints only; the newest of them where no folder is named. A collective."""

    @unless_asked(original)
    def load_state(self: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not any(is_managed(model) for model in self._models):
            return original(self, input_dir, *args, **kwargs)
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            checkpoints = _numbered(Path(self.project_dir, "checkpoints"))
            complete = [path for _, path in checkpoints if not why_incomplete(path)]
            input_dir = str(complete[-1]) if complete else None
        elif input_dir is not None:
            on_rank_zero(lambda: check_complete(Path(input_dir).expanduser()), f"loading {input_dir}")
        return original(self, input_dir, *args, **kwargs)

    return load_state


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints of automatic naming, from old to new."""
    if not folder.is_dir():
        return []
    found = [(_NUMBERED.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted((int(match[1]), path) for match, path in found if match)
