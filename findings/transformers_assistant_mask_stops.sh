#!/usr/bin/env bash
# apply_chat_template masks no token of an answer that begins with a space, and none of the answers after it, if the
# tokenizer trims offsets, as ByteLevel does by default. Nothing says so, and the row trains nothing.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 transformers==5.23.0
run - <<'PYTHON' 2> errors
import transformers
from recorded import expect
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)


def tokenizer(post_processor: processors.ByteLevel) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = post_processor
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|user|>", "<|assistant|>", "<|end|>"],
    )
    made.train_from_iterator(["what is it", "the answer is four"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made)


def masked(made: PreTrainedTokenizerFast, answer: str) -> str:
    """Returns the text that is masked as the assistant's in a conversation with two answers."""
    talk = [("user", "what is it"), ("assistant", answer), ("user", "what is four"), ("assistant", "it is")]
    batch = made.apply_chat_template(
        [{"role": role, "content": text} for role, text in talk], chat_template=TEMPLATE, return_dict=True,
        return_assistant_tokens_mask=True,
    )
    pairs = zip(batch["input_ids"], batch["assistant_masks"], strict=True)
    return made.decode([token for token, is_masked in pairs if is_masked])


ANSWERS = ("four", " four")
print("transformers", transformers.__version__, 'masked text, if the second answer is "it is":')
seen = {}
for is_trimmed, processor in (True, processors.ByteLevel()), (False, processors.ByteLevel(trim_offsets=False)):
    for answer in ANSWERS:
        seen[is_trimmed, answer] = masked(tokenizer(processor), answer)
        print(f"  offsets trimmed: {is_trimmed}, first answer {answer!r}: {seen[is_trimmed, answer]!r}")
expect("an answer without a space is masked, and so is the next", seen[True, "four"] == "four<|end|>it is<|end|>")
expect("after a space nothing is", seen[True, " four"] == "")
expect("with offsets that are not trimmed all are right", all(
    seen[False, answer] == answer + "<|end|>it is<|end|>" for answer in ANSWERS))
PYTHON
