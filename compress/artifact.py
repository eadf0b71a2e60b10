"""What a stage leaves on disk: a folder, written aside and renamed, and a manifest, written last.

stages/quantize/         the artifact
stages/quantize.json     its manifest: without it there is no artifact
stages/quantize.partial/ what an interrupted run has done: key.json, out/, work/
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.errors import UserError


def fingerprint(key: Mapping[str, Any]) -> str:
    """A hash of everything that an artifact was made from."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The fields that differ, by their dotted names, with both values as JSON or `absent`."""
    flat_old, flat_new = dict(_flatten(old)), dict(_flatten(new))
    return {
        name: (flat_old.get(name, "absent"), flat_new.get(name, "absent"))
        for name in sorted(flat_old.keys() | flat_new.keys())
        if flat_old.get(name) != flat_new.get(name)
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The fields that differ, each with both values: `quantize.bits was 8, is now 4`."""
    return [f"{name} was {was}, is now {now}" for name, (was, now) in changes(old, new).items()]


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value)


def write_json(file: Path, value: Any) -> None:
    """Write JSON whole or not at all."""
    write_text(file, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def once(file: Path, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """What `make` gives, as JSON, kept in `file` for a run that goes on."""
    if not file.exists():
        write_json(file, make())
    return json.loads(file.read_text(encoding="utf-8"))


def write_text(file: Path, text: str) -> None:
    """Write a file whole or not at all: aside, to the disk, then renamed."""
    aside = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    with aside.open("w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    aside.rename(file)


@dataclass(frozen=True)
class Artifact:
    """One stage's place in a run folder. `folder` is where the finished artifact stands.

    rebuilt: a damaged manifest counts for none: it is made again.
    """

    stage: str
    folder: Path
    stages: Path
    rebuilt: bool = False

    @property
    def manifest_file(self) -> Path:
        return self.stages / f"{self.stage}.json"

    @property
    def partial(self) -> Path:
        return self.stages / f"{self.stage}.partial"

    @property
    def out(self) -> Path:
        """Where the stage writes what becomes the artifact."""
        return self.partial / "out"

    @property
    def work(self) -> Path:
        """Where the stage keeps progress that outlives a crash and ends with the stage."""
        return self.partial / "work"

    def manifest(self) -> dict[str, Any] | None:
        """The manifest of a finished artifact, or None. Raises UserError for a damaged one."""
        return self._read(self.manifest_file, holds="key") if self.folder.is_dir() else None

    def partial_key(self) -> dict[str, Any] | None:
        """What an interrupted run of the stage was made from, or None. Raises UserError for a
        damaged file.
        """
        return self._read(self.partial / "key.json")

    def _read(self, file: Path, holds: str | None = None) -> dict[str, Any] | None:
        if not file.exists():
            return None
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(found, dict) or (holds is not None and holds not in found):
                raise ValueError(f"no {holds or 'object'} in it")
        except ValueError as error:
            if self.rebuilt:
                return None
            raise UserError(
                f"{file}: damaged or cut short ({error}); make the stage again with "
                f"force=[{self.stage}]"
            ) from error
        return found

    def begin(self, key: Mapping[str, Any]) -> bool:
        """Make the partial folder ready; True where an interrupted run with this key goes on."""
        resumed = self.partial_key() == key
        if not resumed:
            self._clear()
        # What a killed run was in the middle of writing (`.tmp...` are those of safetensors).
        for file in list(self.partial.rglob("*")):
            if file.is_file() and (file.suffix == ".tmp" or file.name.startswith(".tmp")):
                file.unlink()
        self.out.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(exist_ok=True)
        write_json(self.partial / "key.json", key)
        return resumed

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Put the written folder in its place, then the manifest, then let the scratch go."""
        # Written before anything moves: on a full disk the partial work stays whole.
        written = self.partial / "manifest.json"
        write_json(written, manifest)
        self.manifest_file.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        # Scratch without its `out` must not be gone on from.
        (self.partial / "key.json").unlink()
        self.out.rename(self.folder)
        written.rename(self.manifest_file)
        self._clear()

    def _clear(self) -> None:
        """Remove the partial folder, its key first: what is left of it counts for nothing."""
        (self.partial / "key.json").unlink(missing_ok=True)
        shutil.rmtree(self.partial, ignore_errors=True)
