"""Generated short stories with a question and a one-word answer, about movements of people and objects.

The stories replace bAbI (Weston et al. 2015, arXiv 1502.05698) without using sentences or files of bAbI. A story
depends only on the seed and the story's number. A hash of a story's text and question selects training or held-out
data, so that no story is in both.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from random import Random

import numpy as np
import torch
from torch import Tensor

PEOPLE = ("anna", "bruno", "clara", "dario", "elsa", "felix")
PLACES = ("attic", "barn", "cellar", "garden", "kitchen", "library", "yard")
THINGS = ("apple", "book", "cup", "key", "lamp")
NUMBERS = ("none", "one", "two", "three", "four", "five")
MOVES = ("{} went to the {}", "{} walked to the {}", "{} came to the {}")
TAKES = ("{} took the {}", "{} picked up the {}")
DROPS = ("{} dropped the {}", "{} put down the {}")
GIVES = ("{} gave the {} to {}", "{} handed the {} to {}")
QUESTIONS = {
    "where a person is": "where is {}",
    "where a thing is": "where is the {}",
    "where a thing was before": "where was the {} before the {}",
    "who has a thing": "who has the {}",
    "who gave a thing": "who gave the {} to {}",
    "how many things": "how many things has {}",
    "yes or no": "is {} in the {}",
}
"""Question templates by kind."""
KINDS = tuple(QUESTIONS)
SENTENCES, SENTENCE = 50, 7
"""Maximum number of sentences in a story, and of words in a sentence."""
SHORTEST, USUAL = 4, 13.0
"""Number of sentences in the shortest story, and mean number of additional sentences."""
HELD_OUT = 8
"""One of every `HELD_OUT` stories is held out."""
SPELLED = (*MOVES, *TAKES, *DROPS, *GIVES, *QUESTIONS.values())
WORDS = ("", *sorted({*PEOPLE, *PLACES, *THINGS, *NUMBERS, "yes", "no", *" ".join(SPELLED).replace("{}", "").split()}))
"""Vocabulary; index 0 is padding."""


class StoryWorld:
    """State of a story: current places of people and things, and their history."""

    def __init__(self) -> None:
        self.place: dict[str, str] = {}
        """Current place of each person mentioned so far."""
        self.holder: dict[str, str] = {}
        self.places_of: dict[str, list[str]] = {thing: [] for thing in THINGS}
        """Places of each thing in chronological order."""
        self.given: dict[tuple[str, str], str] = {}
        """Latest giver, keyed by thing and receiver."""

    def carried(self, person: str) -> list[str]:
        return [thing for thing in THINGS if self.holder.get(thing) == person]

    def lies(self, thing: str) -> str | None:
        """Return the last known place of a thing, or None."""
        return self.places_of[thing][-1] if self.places_of[thing] else None

    def next_sentence(self, random: Random) -> str:
        """Apply a random possible event and return the sentence that describes it."""
        person = random.choice(PEOPLE)
        place = self.place.get(person)
        here = [other for other in PEOPLE if other != person and place and self.place.get(other) == place]
        loose = [each for each in THINGS if place and each not in self.holder and self.lies(each) in (None, place)]
        carried, chance = self.carried(person), random.random()
        if loose and chance < 0.3:
            return self.take(random, person, random.choice(loose))
        if carried and here and chance < 0.5:
            thing, other = random.choice(carried), random.choice(here)
            self.holder[thing], self.given[thing, other] = other, person
            return random.choice(GIVES).format(person, thing, other)
        if carried and 0.5 <= chance < 0.65:
            thing = random.choice(carried)
            del self.holder[thing]
            return random.choice(DROPS).format(person, thing)
        return self.move(random, person, random.choice([each for each in PLACES if each != place]))

    def take(self, random: Random, person: str, thing: str) -> str:
        self.holder[thing] = person
        if not self.places_of[thing]:
            self.places_of[thing].append(self.place[person])
        return random.choice(TAKES).format(person, thing)

    def move(self, random: Random, person: str, place: str) -> str:
        self.place[person] = place
        for thing in self.carried(person):
            self.places_of[thing].append(place)
        return random.choice(MOVES).format(person, place)

    def question(self, random: Random, kind: str) -> tuple[str, str] | None:
        """Return a random question of kind `kind` with its answer, or None if the story determines no answer."""
        people = [person for person in PEOPLE if person in self.place]
        things = [thing for thing in THINGS if self.places_of[thing]]
        subjects: dict[str, list[tuple[tuple[str, ...], str]]] = {
            "where a person is": [((person,), self.place[person]) for person in people],
            "where a thing is": [((thing,), self.places_of[thing][-1]) for thing in things],
            # a place visited twice would make the question ambiguous
            "where a thing was before": [
                ((thing, there[i]), there[i - 1]) for thing in things for there in [self.places_of[thing]]
                for i in range(1, len(there)) if there.count(there[i]) == 1
            ],
            "who has a thing": [((thing,), self.holder[thing]) for thing in things if thing in self.holder],
            "who gave a thing": list(self.given.items()),
            "how many things": [((person,), NUMBERS[len(self.carried(person))]) for person in people],
        }  # fmt: skip
        if kind == "yes or no" and people:
            person, is_there = random.choice(people), random.random() < 0.5
            other = random.choice([place for place in PLACES if place != self.place[person]])
            subjects[kind] = [((person, self.place[person]), "yes")] if is_there else [((person, other), "no")]
        if not subjects.get(kind):
            return None
        words, answer = random.choice(subjects[kind])
        return QUESTIONS[kind].format(*words), answer


@dataclass(frozen=True)
class BabiStory:
    sentences: tuple[str, ...]
    question: str
    answer: str
    kind: str

    @property
    def is_held_out(self) -> bool:
        digest = hashlib.blake2b("\n".join((*self.sentences, self.question)).encode(), digest_size=8).digest()
        return int.from_bytes(digest) % HELD_OUT == 0


def story(seed: int, number: int) -> BabiStory:
    """Return story `number` of a seed. Question kinds alternate with the number. A story has 4 to 50 sentences, and 20
    on average.
    """
    random, kind = Random(f"{seed}/{number}"), KINDS[number % len(KINDS)]
    while True:
        world = StoryWorld()
        length = min(SHORTEST + int(random.expovariate(1 / USUAL)), SENTENCES)
        sentences = tuple(world.next_sentence(random) for _ in range(length))
        if question := world.question(random, kind):
            return BabiStory(sentences, *question, kind)


@dataclass(frozen=True)
class StoryExamples:
    """Stories as word indices. The sentences of a story come first, then its question."""

    inputs: np.ndarray
    """Word indices of n stories (n, SENTENCES + 1, SENTENCE); 0 is padding. The last row of a story is its question."""
    labels: np.ndarray
    """Word indices of the answers for n stories, (n,)."""
    kinds: np.ndarray
    """Indices into KINDS for the questions of n stories, (n,)."""

    def __len__(self) -> int:
        return len(self.labels)

    def fields(self, indices: np.ndarray) -> dict[str, Tensor]:
        return {
            "inputs": torch.from_numpy(self.inputs[indices].astype(np.int64)),
            "labels": torch.from_numpy(self.labels[indices].astype(np.int64)),
        }


def make_stories(count: int, held_out: bool, seed: int = 0) -> StoryExamples:
    """Return the first `count` stories of a seed: held-out stories if `held_out`, otherwise training stories."""
    inputs = np.zeros((count, SENTENCES + 1, SENTENCE), np.uint8)
    labels, kinds = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
    example = number = 0
    while example < count:
        each = story(seed, number)
        number += 1
        if each.is_held_out != held_out:
            continue
        for row, sentence in (*enumerate(each.sentences), (SENTENCES, each.question)):
            numbers = [word_numbers()[word] for word in sentence.split()]
            inputs[example, row, : len(numbers)] = numbers
        labels[example], kinds[example] = word_numbers()[each.answer], KINDS.index(each.kind)
        example += 1
    return StoryExamples(inputs, labels, kinds)


@cache
def word_numbers() -> dict[str, int]:
    return {word: number for number, word in enumerate(WORDS)}
