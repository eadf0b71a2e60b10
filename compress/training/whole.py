"""How a smaller dense model learns from the original's labels: all its weights at one rate."""

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from compress import heldout, processes
from compress.blocks.structure import stored_name
from compress.stage import Run
from compress.tensors import TensorFiles
from compress.training.labels import Labels
from compress.training.loop import History
from compress.training.student import Objective, teach
from compress.training.trainable import load_exact

if TYPE_CHECKING:
    from compress.stages.shrink import Shrink


def learn_all(
    settings: "Shrink", run: Run, given: Path, held: Path, made: Labels, batch: int
) -> tuple[History, dict[str, Tensor]]:
    """Train all weights of the model in `given` on `batch` windows of `made` a step, of which
    several processes each take a share, measured by what the original says in `held`: the curve,
    and the best step's tensors by their stored names.
    """
    processes.refuse_fewer("shrink.batch", batch)
    model = load_exact(given, run.config)
    history = teach(
        model,
        [(settings.rate, dict(model.named_parameters()))],
        made,
        batch,
        Objective("kl", hard=settings.hard),
        settings,
        lambda: heldout.distance_of(model, held).kl,
        run,
    )
    best = {stored_name(model.config, name): value for name, value in history.best.items()}
    # A tied head learns as the embedding; some files hold both.
    files = TensorFiles(given)
    for head, embedding in model.all_tied_weights_keys.items():
        if (name := stored_name(model.config, head)) in files:
            best[name] = history.best[embedding]
    return history, best
