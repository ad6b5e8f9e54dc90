"""Word problems that a very small model can learn: the embedded task and its word-level tokenizer.

A prompt tells of a person who has some items and gets or loses some; the answer works it out and ends in
`answer N`:

    Miran has 12 bolets . Miran loses 5 . how many ?
    so Miran reckons 12 - 5 = 7 . answer 7

Every number is one token. Names and items fill the vocabulary to 1,079 words, and the verb of the answer is
drawn by Zipf's law from 60, so that a teacher row has a real tail: its top 8 tokens are not the whole story.

The two splits share the sums and differ in the (name, item) pairs: a pair whose two indices add to a multiple
of 8 appears in held-out problems only, every other pair in training problems only.
"""

import random
from typing import Literal

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

NUMBERS = [str(n) for n in range(41)]
NAMES = [
    first + second + last
    for first in ("Mi", "Ka", "Lo", "Te", "Ru", "Na", "Si", "Bo")
    for second in ("ra", "li", "no", "ve", "da")
    for last in ("n", "s", "ta")
]
ITEMS = [
    first + middle + plural
    for first in ("bo", "ca", "di", "fe", "gu", "ha", "lu", "me", "no", "pi", "ro", "ta")
    for middle in ("l", "nd", "rr", "t", "sk", "mp", "v")
    for plural in ("ets", "ons", "ies", "als", "ings", "ums", "ents", "ows", "ers", "ats")
]
# By rank: the first is the most frequent.
VERBS = """
    counts reckons finds works writes sees says thinks adds knows takes makes tries checks notes tells shows
    solves computes figures learns states claims guesses reasons infers deduces derives obtains reads draws
    marks sums tallies totals weighs measures sorts ranks lists logs records files tracks traces maps plots
    charts models proves argues recalls repeats whispers shouts hums sings chants nods smiles
""".split()  # noqa: SIM905
LEADS = ["so", "then", "now"]
WORDS = ["has", "gets", "loses", "more", "how", "many", "?", ".", "+", "-", "=", "answer"]
SPECIAL = ["<pad>", "<bos>", "<eos>"]

_LARGEST = 19  # of the numbers in a prompt: with larger ones the sums take far longer to learn
_CYCLE = 8  # one (name, item) pair in 8 is held out
_VERB_WEIGHTS = [1 / rank for rank in range(1, len(VERBS) + 1)]


def problems(split: Literal["train", "heldout"], count: int, seed: int = 0) -> list[dict[str, str]]:
    """Draw word problems, the same ones for the same arguments.

    Args:
        split: "train" or "heldout"; no prompt is in both (see the module's header).
        count: how many; prompts may repeat, though rarely.
        seed: another seed draws other problems of the same split.

    Returns:
        Dicts of `prompt` and `answer`, both words separated by single spaces, without special tokens.

    Raises:
        ValueError: `split` is neither of the two.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f'split is {split!r}; expected "train" or "heldout"')
    rng = random.Random(f"{split} {seed}")
    return [_problem(rng, split == "heldout") for _ in range(count)]


def _problem(rng: random.Random, heldout: bool) -> dict[str, str]:
    name = rng.randrange(len(NAMES))
    pair = 0 if heldout else rng.randrange(1, _CYCLE)  # (name + item) modulo the cycle
    item = (pair - name) % _CYCLE + _CYCLE * rng.randrange(len(ITEMS) // _CYCLE)
    who, what = NAMES[name], ITEMS[item]
    a, b = rng.randint(0, _LARGEST), rng.randint(0, _LARGEST)
    if rng.random() < 0.5:
        change, result = f"gets {b} more" if rng.random() < 0.5 else f"gets {b}", a + b
        operator = "+"
    else:
        a, b = max(a, b), min(a, b)
        change, result, operator = f"loses {b}", a - b, "-"
    opening = [rng.choice([*LEADS, ""]), rng.choice([who, ""]), rng.choices(VERBS, _VERB_WEIGHTS)[0]]
    answer = f"{' '.join(filter(None, opening))} {a} {operator} {b} = {result} . answer {result}"
    return {"prompt": f"{who} has {a} {what} . {who} {change} . how many ?", "answer": answer}


def tokenizer() -> PreTrainedTokenizerFast:
    """Build the word-level tokenizer: one token per word, `<bos>` put before every text, padding on the left.

    A word outside the vocabulary is an error, not an unknown token.
    """
    vocabulary = SPECIAL + NUMBERS + WORDS + LEADS + VERBS + NAMES + ITEMS
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(vocabulary)}))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", vocabulary.index("<bos>"))])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
