"""What a stage is, and what it is given."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from compress.config import Config


@dataclass(frozen=True)
class Run:
    """What a stage may read.

    `config` is the whole configuration, for the sections that stages share (model, data, engine,
    device, seed). `artifacts` maps a kind (`dense`, `statistics`, `quantized`, `checkpoint`, ...)
    to the folder that holds it; a stage finds there the kinds that it declares in `needs`. `work`
    is the stage's scratch folder: what is kept there outlives a crash, until the stage is done.
    `manifests` maps the stages done so far, in order, to what their manifests say.
    """

    config: "Config"
    artifacts: Mapping[str, Path]
    work: Path
    manifests: Mapping[str, Mapping[str, Any]]

    @property
    def original(self) -> Path:
        """The model that was given, by which all is measured: `dense`, unless the stage shrink put
        a smaller one in its place.
        """
        return self.artifacts.get("original", self.artifacts["dense"])

    @property
    def stages(self) -> Path:
        """The folder that holds what all stages leave."""
        return self.work.parent.parent


@runtime_checkable
class Stage(Protocol):
    """One step of the pipeline: a dataclass whose fields are its configuration.

    name: the word for it in `stages=`, `only=` and `force=`.
    version: raised whenever the same settings would give another result; an old artifact is
        then refused as for a changed field.
    needs: kinds of artifact it reads. gives: the kind it makes, or None for figures alone.
    shares: the sections of the configuration beside its own that its result depends on.
    """

    name: ClassVar[str]
    version: ClassVar[int]
    needs: ClassVar[tuple[str, ...]]
    gives: ClassVar[str | None]
    shares: ClassVar[tuple[str, ...]]

    def run(self, run: Run, out: Path) -> dict[str, Any]:
        """Do the work, write the artifact's files into `out`, return the figures for the manifest.

        `out` exists, is empty but for the stage's own earlier, interrupted progress, and becomes
        the artifact only after this returns.
        """
        ...
