#!/usr/bin/env bash
# After a call with truncation and padding, save_pretrained writes both into tokenizer.json. transformers ignores them
# there, but an engine that reads the file with the library tokenizers cuts every prompt at that length.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch transformers==5.23.0 tokenizers==0.23.2
run - <<'PYTHON' 2> errors
from importlib.metadata import version

from recorded import expect
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

words = ["<pad>", "<eos>"] + [f"w{i}" for i in range(20)]
plain = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<pad>"))
plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
LONG = " ".join(words[2:])


def lengths(folder: str) -> list[int]:
    """Returns how many tokens a text of 20 words has in transformers and in tokenizers, and one word beside it."""
    tokenizer.save_pretrained(folder)
    engine = Tokenizer.from_file(f"{folder}/tokenizer.json")
    trainer = AutoTokenizer.from_pretrained(folder)
    return [len(trainer(LONG)["input_ids"]), *(len(encoding.ids) for encoding in engine.encode_batch([LONG, "w1"]))]


before = lengths("before")
tokenizer([LONG, "w1"], truncation=True, max_length=6, padding=True)
after = lengths("after")
tokenizer(LONG)
again = lengths("again")
print("transformers", version("transformers"), "tokenizers", version("tokenizers"), "20 words, and 1 word:")
saved = {"before": before, "after a cut call": after, "after a plain call": again}
for name, (trainer, engine, short) in saved.items():
    print(f"  saved {name:19} transformers {trainer} tokens; tokenizers {engine}, and {short} for the one word")
expect("a tokenizer that was never cut is read alike", before == [20, 20, 1])
expect("after a call that cuts, tokenizers cuts and pads each batch", after == [20, 6, 6])
expect("a plain call before saving helps", again == [20, 20, 1])
PYTHON
