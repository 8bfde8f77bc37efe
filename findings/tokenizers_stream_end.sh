#!/usr/bin/env bash
# DecodeStream keeps back a text that ends in the middle of a character, and has no call that returns the rest. The
# chunks of an answer that was cut there are shorter than its decoded text.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" tokenizers==0.23.2
run - <<'PYTHON'
import random

import tokenizers
from recorded import expect
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()


def streamed(ids: list[int]) -> str:
    stream = DecodeStream()
    return "".join(stream.step(tokenizer, token) or "" for token in ids)


whole = tokenizer.encode("5 €").ids
cut = whole[:-1]
random.seed(0)
answers = [[random.randrange(256) for _ in range(60)] for _ in range(300)]
pairs = [(streamed(ids), tokenizer.decode(ids)) for ids in answers]
different = [(stream, text) for stream, text in pairs if stream != text]
print("tokenizers", tokenizers.__version__)
print("cut in the middle of a character:", repr(streamed(cut)), "streamed,", repr(tokenizer.decode(cut)), "decoded")
print(f"{len(different)} of {len(answers)} random answers differ")
expect("a whole text is streamed as it is decoded", streamed(whole) == tokenizer.decode(whole) == "5 €")
expect("a cut one is shorter", streamed(cut) == "5 " and tokenizer.decode(cut) == "5 \ufffd")
expect("so are many random answers", len(different) > 50)
expect("only their ends are missing", all(text.startswith(stream) for stream, text in different))
PYTHON
