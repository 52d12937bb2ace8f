"""Checkpoints that are whole or not there, and the state a run goes on from.

    checkpoints/step-00000200/   heads/                   loads like any heads folder
                                 optimizer.safetensors    its state, whole, whatever engine it comes from
                                 process-0.safetensors    generators and sums not yet logged, one file a process
                                 progress.json            step, place in the data, best so far, settings; the size and
                                                          hash of every other file, and a hash of itself

Everything is written to a hidden folder beside and renamed at the end. There is no stored schedule and no stored
order: both follow from the settings and the numbers in progress.json. A checkpoint that is not what was written is
never loaded: the newest whole one is, and the broken ones are set aside as ``step-00000200.damaged``.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from train.engine_state import EngineState, read_own, write_own
from train.figures import Sums
from train.files import sync
from train.manifest import PROGRESS, fault, read_progress, seal, sizes_and_hashes
from train.ranks import Ranks

FORMAT = 2
PLACE = re.compile(r"step-(\d{8,})")
# what a killed run may leave: half written, half removed, or put out of the way of a newer one at the same step
LEFT = re.compile(r"\.(step-\d{8,})\.(partial|gone|old)")


@dataclass
class Progress:
    """Where a run is.

    Attributes:
        step: optimizer steps done.
        epoch, batch: the next step's place in the data.
        best, best_step: highest decoded tokens per round of an evaluation so far, and the step it was at.
        log_bytes: size of log.jsonl.
        figures: what was last logged of training.
        evaluation: what the last evaluation found, and ``step``, when it was.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    best: float = 0.0
    best_step: int = -1
    log_bytes: int = 0
    figures: dict[str, float] | None = None
    evaluation: dict[str, Any] | None = None


class Checkpoints:
    """The checkpoints of one run folder.

    Args:
        folder: the run folder's ``checkpoints``.
        state: weights and optimizer.
        sums: what is stored of figures that are not logged yet.
        settings: what must be equal for a run to be continued; stored with each checkpoint.
        others: settings that may differ then, which is said.
        keep: newest checkpoints to keep, beside the best.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        state: EngineState,
        sums: Sums,
        settings: dict[str, Any],
        others: dict[str, Any],
        keep: int,
    ) -> None:
        self.folder, self.ranks, self.state, self.sums = folder, ranks, state, sums
        self.settings, self.others, self.keep = settings, others, max(1, keep)

    def at(self, step: int) -> Path:
        """Folder of the checkpoint at ``step``, whether it exists or not."""
        return self.folder / f"step-{step:08d}"

    def there(self) -> list[Path]:
        """All that stand here, broken ones too, the newest first; an empty folder is none."""
        if not self.folder.is_dir():
            return []
        places = [place for place in self.folder.iterdir() if PLACE.fullmatch(place.name) and place.is_dir()]
        return sorted((place for place in places if any(place.iterdir())), key=_step, reverse=True)

    def newest(self, say: Callable[[str], None] = lambda text: None) -> Path | None:
        """The whole checkpoint of the highest step; newer ones that are broken are named and set aside.

        What a killed run left half done is cleared away first. All processes call it, before they train.

        Raises:
            ValueError: there are checkpoints, and all are broken; they are left where they are.
        """
        self.ranks.on_main(self._clear, f"clearing {self.folder}")
        broken: list[tuple[Path, str]] = []
        for place in self.ranks.share(self.there()):
            found = fault(place, self.ranks)
            if found is None:
                for each, what in broken:
                    say(f"warning: checkpoint {each} is damaged ({what}): kept as {self._set_aside(each)}")
                return place
            broken.append((place, found))
        if broken:
            listed = "; ".join(f"{place}: {what}" for place, what in broken)
            raise ValueError(
                f"no checkpoint of this run is whole ({listed}): restore one of them, or set output.folder to a new "
                "folder"
            )
        return None

    def save(self, progress: Progress) -> Path:
        """Write a checkpoint; all processes call it. One that is there with the same progress is left as it is.

        Raises:
            OSError: on every process, when it failed on any; nothing of it is left then, older ones are untouched.
        """
        place = self.at(progress.step)
        if not self.ranks.share(_same(place, progress)):
            self._write(place, progress)
        # of one that is there too: the run may have been killed between the two
        self.ranks.on_main(lambda: self._prune(progress.best_step), f"pruning {self.folder}")
        return place

    def _write(self, place: Path, progress: Progress) -> None:
        partial = place.with_name(f".{place.name}.partial")
        self._together(lambda: self._start(partial), f"writing checkpoint {place}", partial)
        self._together(lambda: self._parts(partial), f"writing checkpoint {place}", partial)
        self._together(lambda: self._seal(partial, progress), f"writing checkpoint {place}", partial)
        self._together(lambda: self._place(partial, place), f"placing {place}", partial)

    def _together(self, action: Callable[[], object], doing: str, partial: Path) -> None:
        """Run ``action`` everywhere; if it fails anywhere, remove what was written and raise everywhere."""
        error: Exception | None = None
        try:
            action()
        except Exception as caught:  # a full disk shows as one of several types, by library
            error = caught
        try:
            self.ranks.all_succeed(error, doing)
        except OSError:
            if self.ranks.main:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _start(self, partial: Path) -> None:
        if self.ranks.main:
            shutil.rmtree(partial, ignore_errors=True)  # of an attempt that failed
            partial.mkdir(parents=True)

    def _parts(self, partial: Path) -> None:
        if not partial.is_dir():
            raise OSError(f"process {self.ranks.index} does not see {partial}: output.folder must be on a shared disk")
        write_own(partial, self.ranks, self.sums)
        self.state.write(partial)

    def _seal(self, partial: Path, progress: Progress) -> None:
        files = sizes_and_hashes(partial, self.ranks)
        if self.ranks.main:
            content = {
                "format": FORMAT,
                "progress": asdict(progress),
                "processes": self.ranks.count,
                "settings": self.settings,
                "others": self.others,
                "files": files,
            }
            (partial / PROGRESS).write_text(seal(content), encoding="utf-8")
            sync(partial / PROGRESS)
            for folder in [partial, *(path for path in partial.rglob("*") if path.is_dir())]:
                sync(folder)

    def _place(self, partial: Path, place: Path) -> None:
        if not self.ranks.main:
            return
        old = place.with_name(f".{place.name}.old")
        if (place / PROGRESS).is_file():
            place.rename(old)
        partial.rename(place)
        sync(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def _prune(self, best_step: int) -> None:
        for place in self.there()[self.keep :]:
            if place != self.at(best_step) and (place / PROGRESS).is_file():
                gone = place.with_name(f".{place.name}.gone")
                place.rename(gone)  # at once, so that it is never found half removed
                shutil.rmtree(gone)

    def _clear(self) -> None:
        """Finish what a killed run left half done."""
        for left in sorted(self.folder.glob(".step-*")):
            match = LEFT.fullmatch(left.name)
            if match is None:
                continue
            place = left.with_name(match[1])
            if match[2] == "old" and not place.exists():
                left.rename(place)
            else:
                shutil.rmtree(left)

    def _set_aside(self, place: Path) -> Path:
        aside = place.with_name(f"{place.name}.damaged")
        number = 1
        while aside.exists():
            number += 1
            aside = place.with_name(f"{place.name}.damaged-{number}")
        aside = self.ranks.share(aside)
        self.ranks.on_main(lambda: place.rename(aside), f"renaming {place}")
        return aside

    def load(self, place: Path, seed: int) -> tuple[Progress, list[str]]:
        """Put weights, optimizer, generators and sums back, on all processes; a whole checkpoint is asked for.

        Returns:
            Where it was, and what is otherwise than it was then, in words.

        Raises:
            ValueError: the checkpoint is of a run with other settings (they are named), or of another version.
        """
        content = read_progress(place)
        if content.get("format") != FORMAT:
            raise ValueError(
                f"{place} has format {content.get('format', 1)}, this version reads {FORMAT}: set output.folder to a "
                "new folder"
            )
        differing = differences(content["settings"], self.settings)
        if differing:
            raise ValueError(
                f"{place} is of a run with other settings ({'; '.join(differing)}): "
                "set them back to go on with it, or set output.folder to a new folder"
            )
        progress, before, now = Progress(**content["progress"]), content["processes"], self.ranks.count
        notes = differences(content["others"], self.others)
        if before != now:
            notes.append(
                f"{before} {'process' if before == 1 else 'processes'} then, {now} now: the same steps on the same "
                "conversations; losses differ by rounding" + (", new processes draw anew" if now > before else "")
            )
        self.state.read(place)
        read_own(place, self.ranks, self.sums, before, (seed, progress.step))
        return progress, notes


def _same(place: Path, progress: Progress) -> bool:
    try:
        return bool(read_progress(place)["progress"] == json.loads(json.dumps(asdict(progress))))
    except (OSError, ValueError, KeyError):
        return False


def _step(place: Path) -> int:
    return int(place.name.removeprefix("step-"))


def differences(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """``section.key a → b`` for each setting that changed."""
    names = sorted(stored.keys() | now.keys())
    return [f"{n} {stored.get(n)!r} → {now.get(n)!r}" for n in names if stored.get(n) != now.get(n)]
