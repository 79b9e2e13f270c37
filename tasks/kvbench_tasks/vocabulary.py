"""The words of the reference tasks: one word, one token, single spaces in between."""

from __future__ import annotations

from string import ascii_lowercase, digits
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL_WORDS = (PAD, BOS, EOS, UNKNOWN)
FAMILY_WORDS = ("recurrence", "codebook", "ledger", "program", "chain", "stack")
PUNCTUATION = (":", ";", "#", "+", "-", "=", "->")
KEYWORDS = ("do", "answer", "sum", "start", "loop", "push", "pop", "low", "high")

VOCABULARY: tuple[str, ...] = (*SPECIAL_WORDS, *digits, *ascii_lowercase, *FAMILY_WORDS, *PUNCTUATION, *KEYWORDS)
"""Every word, in the order of the token ids. The reference model knows this order: append, never insert."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the reference model.

    It adds nothing of its own: a prompt spells out its `<bos>`.
    """
    # Imported here because a task must load without transformers.
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=words,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )
