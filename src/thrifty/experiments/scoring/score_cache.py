"""Cache of the scores of finished runs. The key is a hash of everything that determines the scores."""

import hashlib
import json
from pathlib import Path

from thrifty.core.atomic_files import NO_ROOM, AtomicFiles
from thrifty.core.cache_dir import cache_folder
from thrifty.core.errors import IntegrityError, ThriftyError
from thrifty.core.score_file import ExampleScores, ScoreProvenance, read_scores, scores_bytes


def cache_path(facts: ScoreProvenance, clusters: int, seed: int) -> Path:
    """Return the cache path for the scores of a run with the given provenance, clusters and seed."""
    depends = [facts.method, facts.recipe_sha256, facts.fingerprint, facts.steps, facts.steps_of_recipe, clusters]
    key = hashlib.blake2b(json.dumps([*depends, facts.thrifty]).encode(), digest_size=16).hexdigest()
    return cache_folder() / "scores" / key / f"seed-{seed}.safetensors"


def read_cached_scores(place: Path) -> ExampleScores | None:
    """Return the cached scores; None if the file is missing or damaged."""
    if not place.is_file():
        return None
    try:
        return read_scores(place)
    except IntegrityError:
        return None


def write_scores(path: Path, scores: ExampleScores) -> str:
    """Write a score file atomically; return its sha256."""
    try:
        AtomicFiles().make_folders(path.parent)
        return AtomicFiles().swap(path, scores_bytes(scores)).sha256
    except OSError as error:
        fix = "free some space there" if error.errno in NO_ROOM else "check the folder's permissions"
        raise ThriftyError(f"'{path}' cannot be written: {error.strerror}", fix=fix) from error
