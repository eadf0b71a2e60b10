"""What the linears of a block see and give, gathered by hooks while windows pass through it."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from compress import processes
from compress.errors import UserError
from compress.text.hygiene import profile_divergence

OUTLIER = 6.0
TINY = 1e-12

Sums = dict[str, Tensor]


class Collector:
    """Statistics of a block's linears over the real tokens of the windows that pass through it.

    linears: by their full names; those that read the same tensor share one entry. pick: positions
    [n, r] of each window whose inputs are kept as they are.
    """

    def __init__(self, linears: dict[str, nn.Linear], pick: Tensor) -> None:
        self.linears = linears
        self.pick = pick
        self.owner: dict[str, str] = {}
        self._sums: dict[str, Sums] = {}
        self._outputs: Sums = {}
        self._seen: dict[int, str] = {}

    def __enter__(self) -> "Collector":
        self._hooks = [
            linear.register_forward_hook(
                lambda _, args, given, name=name: self._see(name, args[0], given)
            )
            for name, linear in self.linears.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._seen = {}

    def start(self, first: int, mask: Tensor) -> None:
        """Announce a batch: the number of its first window, and its mask [B, T]."""
        self._first, self._real, self._seen = first, mask.bool(), {}
        self._alive: list[Tensor] = []

    def _see(self, name: str, inputs: Tensor, given: Tensor) -> None:
        outputs = given[self._real].float()
        largest = torch.maximum(outputs.amax(0), -outputs.amin(0))  # 4 times as fast as aminmax
        self._outputs[name] = torch.maximum(self._outputs.get(name, largest), largest)
        owner = self._seen.setdefault(id(inputs), name)
        self.owner[name] = owner
        if owner != name:
            return
        self._alive.append(inputs)  # or its id could be another's before the batch ends
        picked = self.pick[self._first : self._first + len(inputs)].to(inputs.device)
        rows = inputs.gather(1, picked.unsqueeze(-1).expand(-1, -1, inputs.shape[-1]))
        batch = _sums(inputs[self._real].float()) | {"rows": rows.flatten(0, 1)}
        before = self._sums.get(name)
        self._sums[name] = batch if before is None else _merged(before, batch)

    def tensors(self) -> dict[str, Tensor]:
        """`<linear>.<statistic>` for every linear: absmax, mean_abs, relative and
        outlier_share [K], output_absmax [N], tokens [], rows [R, K].

        relative: root mean square after each token was divided by its own, which is how an input
        quantized per token looks to the quantizer. outlier_share: of the tokens in which the
        channel is more than OUTLIER times the token's root mean square. Of several processes that
        each saw a share of the windows, all give what came of the whole. Raises UserError where a
        linear saw nothing, or something not finite.
        """
        own = {name: _on_cpu(sums) for name, sums in self._sums.items()}
        self._take_in(processes.gathered((self.owner, own, _on_cpu(self._outputs))))
        found = {}
        for name in self.linears:
            sums = self._sums.get(self.owner.get(name, ""))
            if sums is None:
                raise UserError(f"{name}: no calibration token reached it; nothing can be measured")
            if not torch.isfinite(sums["absmax"]).all():
                raise UserError(
                    f"{name}: its inputs are not finite (NaN or Inf) on the calibration text; "
                    "wanted finite numbers: the weights before it are damaged"
                )
            tokens = sums["tokens"]
            statistics = {
                "absmax": sums["absmax"],
                "mean_abs": (sums["sum_abs"] / tokens).float(),
                "relative": (sums["sum_relative"] / tokens).sqrt().float(),
                "outlier_share": (sums["outliers"] / tokens).float(),
                "output_absmax": self._outputs[name],
                "tokens": tokens,
                "rows": sums["rows"],
            }
            for key, value in statistics.items():
                found[f"{name}.{key}"] = value.contiguous().clone()
        return found

    def _take_in(self, parts: list[tuple[dict[str, str], dict[str, Sums], Sums]]) -> None:
        """Be what the collectors of all processes are together; `parts` in their order."""
        self._sums, self._outputs = {}, {}
        for owner, sums, outputs in parts:
            self.owner |= owner
            for name, part in sums.items():
                before = self._sums.get(name)
                self._sums[name] = part if before is None else _merged(before, part)
            for name, largest in outputs.items():
                self._outputs[name] = torch.maximum(self._outputs.get(name, largest), largest)


def compared(
    linear: str, calibration: dict[str, Tensor], held: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Of a linear, `input_absmax` [] and `output_absmax` [N] over both texts, and `divergence` []
    between what it reads in the one and in the other; calibration, held: from `Collector.tensors`.
    """
    one, other = (
        {key: found[f"{linear}.{key}"] for key in ("absmax", "output_absmax", "relative")}
        for found in (calibration, held)
    )
    return {
        f"{linear}.input_absmax": torch.maximum(one["absmax"], other["absmax"]).max(),
        f"{linear}.output_absmax": torch.maximum(one["output_absmax"], other["output_absmax"]),
        f"{linear}.divergence": profile_divergence(one["relative"], other["relative"]),
    }


def picked_rows(mask: Tensor, rows: int) -> Tensor:
    """For each window the positions [n, r] of real tokens whose inputs are kept as they are.

    mask: [n, T], padded on the right. The first is always one: models park attention there, with
    activations a thousand times those of other tokens (Sun et al. 2024, arXiv:2402.17762), which
    no random pick would meet. That they are half of the rows of 128 windows does no harm that was
    seen: docs/log.md.
    """
    generator = torch.Generator().manual_seed(0)
    each = max(2, -(-rows // len(mask)))
    picked = []
    for row in mask:
        last = max(0, int(row.sum()) - 1)
        others = torch.randint(min(1, last), last + 1, (each - 1,), generator=generator)
        picked.append(torch.cat([torch.zeros(1, dtype=torch.int64), others]))
    return torch.stack(picked)


def load_block_statistics(folder: Path, index: int) -> dict[str, Tensor]:
    """What `Collector.tensors` gave for block `index`, and what calibrate added to it."""
    return load_file(folder / f"block_{index:03d}.safetensors")


def layer_figures(folder: Path, blocks: int) -> dict[str, Any]:
    """What the statistics in `folder` come to, by linear and over all, for the manifest."""
    layers: list[dict[str, Any]] = []
    largest = 0.0
    for index in range(blocks):
        tensors = load_block_statistics(folder, index)
        for key, value in tensors.items():
            name, _, statistic = key.rpartition(".")
            if statistic == "output_absmax":
                largest = max(largest, float(value.max()))
            if statistic != "absmax":
                continue
            layers.append(
                {
                    "name": name,
                    "tokens": int(tensors[f"{name}.tokens"]),
                    "absmax": float(value.max()),
                    "mean_abs": float(tensors[f"{name}.mean_abs"].mean()),
                    "outlier_share": float(tensors[f"{name}.outlier_share"].mean()),
                    "dead_channels": int((value == 0).sum()),
                    "divergence": float(tensors[f"{name}.divergence"]),
                    "largest_input": float(tensors[f"{name}.input_absmax"]),
                    "largest_output": float(tensors[f"{name}.output_absmax"].max()),
                }
            )
            largest = max(largest, layers[-1]["largest_input"])
    return {
        "linears": len(layers),
        "least_tokens": min((layer["tokens"] for layer in layers), default=None),
        "largest_activation": largest,
        "layers": layers,
    }


def _on_cpu(sums: Sums) -> Sums:
    return {key: value.cpu() for key, value in sums.items()}


def _sums(x: Tensor) -> Sums:
    """Sums over the tokens of inputs [tokens, K]."""
    size = x.abs()
    relative = x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(TINY)
    return {
        "absmax": size.amax(0),
        "sum_abs": size.sum(0, dtype=torch.float64),
        "sum_relative": relative.square().sum(0, dtype=torch.float64),
        "outliers": (relative.abs() > OUTLIER).sum(0),
        "tokens": torch.tensor(len(x)),
    }


def _merged(before: Sums, batch: Sums) -> Sums:
    merged = {key: before[key] + batch[key] for key in before if key not in ("absmax", "rows")}
    merged["absmax"] = torch.maximum(before["absmax"], batch["absmax"])
    merged["rows"] = torch.cat([before["rows"], batch["rows"]])
    return merged
