"""Contains the mathematics of a correction, its metrics and its guards.

These records hold the data of a hook call. They are listed in the order in which an optimizer step uses them.

Before its first call:

    Reporter            what a run does with its metrics: layout, file, guards
    Ranks               this process among those that train a step
    MetricsLayout       name and place of each sum that calls add up
    EffectCount         one of these sums: tokens that a step clipped, rejected or kept
    Samples             the step's samples, recognised by their loss masks
    SampleRow           one sample of any rank, for corrections that couple samples
    OptimizerStep       what the calls of one step share: samples, plan, sums
    NonFiniteTracker    the step's first log-prob that is not finite
    Plan                numbers, factors and groups that need the whole step

In each call:

    LossCall            the running call of the policy loss: the batch and step that it does not pass
    HookCall            the host's arguments: lists with one tensor per sample
    Hook                the called function, as the run has configured it
    Parallel            this rank among those that share sequences
    Segments            lengths and response mask of the packed sequences, and sums over them
    Head                the sampler's most likely tokens, for center
    Support             all tokens that the sampler could draw, in place of a head
    Tokens              the call's tensors, packed: one number per token
    Bounds              the host's PPO clip range
    HookInputs          Tokens, and everything else that decides the result
    StepInputs          what each step reads: log-ratios and statistics
    StatisticKey        the name of one statistic
    ExceedsLimit        a quantity to add up: how far a token is above a limit
    ByPosition          a quantity to add up: a value times the tokens before it
    State               weights and keep flags between two steps
    StepRecord          the units that one step kept or clipped, for metrics
    SequenceStatistics  ratio and length of each sequence, for metrics
    Outcome             what the steps decided: weights, keep flags
    LossInputs          what a surrogate or term reads, 0 where a token does not count
    StepSums            the call's share of the metrics
    HookResult          loss, kept tokens and sums, for the host and the step

At the end of the step:

    Totals              the sums of all ranks, as Python numbers
    Guard               the range of a metric, and what happens outside
    Watch               for how many steps each metric has been outside its range
"""
