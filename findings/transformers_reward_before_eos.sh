#!/usr/bin/env bash
# A reward model of transformers whose padding token is its end token reads the score one token early: it looks for
# the last token that is not padding, and the answer's end counts as padding, whatever the attention mask says.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 transformers==5.23.0
run - <<'PYTHON' 2> errors
import torch
import transformers
from recorded import expect
from transformers import LlamaConfig, LlamaForSequenceClassification

END, PADDING = 1, 0


@torch.no_grad()
def scores(padding: int) -> tuple[float, list[float]]:
    """Returns the reward of a text that ends in the end token, and the head's scores at its tokens."""
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(
        LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=2, num_labels=1, pad_token_id=padding, eos_token_id=END)
    ).eval()
    model.model.embed_tokens.weight.normal_()
    text = torch.tensor([[5, 6, 7, 8, END]])
    mask = torch.ones_like(text)
    return model(text, attention_mask=mask).logits.item(), model.score(model.model(text, mask)[0])[0, :, 0].tolist()


print("transformers", transformers.__version__, "a text of 5 tokens with the end token last, and a mask of ones:")
places = {}
for padding in (PADDING, END):
    reward, at_tokens = scores(padding)
    places[padding] = [abs(reward - score) < 1e-5 for score in at_tokens].index(True)
    print(f"  padding token {padding}, end token {END}: reward {reward:.3f}, scores", *(f"{s:.3f}" for s in at_tokens))
expect("with its own padding token the reward is read at the end token", places[PADDING] == 4)
expect("with the end token as padding it is read one token before", places[END] == 3)
PYTHON
