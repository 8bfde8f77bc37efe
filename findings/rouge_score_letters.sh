#!/usr/bin/env bash
# rouge-score keeps the letters a to z and digits, and nothing else: two equal answers in Chinese or Cyrillic score 0,
# and formulas that differ in a sign score 1.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" numpy==2.4.6 rouge-score==0.1.2
run - <<'PYTHON'
from recorded import expect
from rouge_score.rouge_scorer import RougeScorer


def score(label: str, answer: str) -> float:
    """Returns the F-measure of ROUGE-L."""
    return RougeScorer(["rougeL"]).score(label, answer)["rougeL"].fmeasure


chinese, russian = score("答案是四", "答案是四"), score("ответ четыре", "ответ четыре")
signs, english = score("x - 2 = -1", "x + 2 = 1"), score("the answer is four", "the answer is four")
print(f"rouge-score 0.1.2: equal Chinese {chinese}, equal Russian {russian}, equal English {english}, signs {signs}")
expect("two equal Chinese and two equal Russian answers score 0", chinese == russian == 0)
expect("two equal English answers score 1", english == 1)
expect("formulas that differ in their signs score 1", signs == 1)
PYTHON
