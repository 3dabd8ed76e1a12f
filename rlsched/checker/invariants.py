"""The invariants: their ids, each with its statement. Why each is there stands in ``docs/invariants.md``."""

INVARIANTS: dict[str, str] = {
    "CAUSE": "Every effect names a command that was issued, is unanswered and can have it; time and ids never go back.",
    "CAP": "At a training admission, itself included: unpublished + buffered + running <= (eta+1)B and running <= C.",
    "SYNC": "On-policy: every trained token is of the version that it updates. Quiet: nothing generates meanwhile.",
    "ORDER": "A batch takes the lowest ordinals among the groups that are not terminal.",
    "AGE": "Versions trained at train_start minus the version of the oldest trained token is within the bound.",
    "LABEL": "A segment's version is the one installed on its engine; its KV is no newer, nor older than promised.",
    "PUBLISH": "A version is published when it is trained and installed on every serving engine, and admits name it.",
    "MONO": "Versions and batches advance one at a time, optimizer steps increase, nothing untrained is transferred.",
    "ATOMIC": "An update takes in all of its bytes, bucket by bucket, while no token is made and no other update runs.",
    "MEM": "What is resident fits its device, whoever moves a part says so, and who computes is awake.",
    "WEIGHTS": "After a level-2 sleep no token is made until weights are installed.",
    "FLUSH": "Under the flush promise the KV cache is flushed, or slept away, between an install and the next token.",
    "PAUSE": "No token is told of an engine that stands still; pause and resume alternate.",
    "REPLICA": "A request goes to an engine that holds the published version, or one at most `skew` older.",
    "ABORT": "An abort is done when each rollout that it names has come back; no other rollout is aborted.",
    "BUDGET": "The tokens of a rollout stay within the budget, and a request says rightly how many exist.",
    "PARTIAL": "Under restart and drain a trained rollout is of one version; under other fates its tokens are kept.",
    "ONCE": "Ids are used once, a rollout is live once at a time, and a group is trained at most once.",
    "CONS": "Only what was admitted is dispatched, scored and ended, and each group ends exactly once.",
    "GROUP": "A group is accepted when whole, and trained with exactly the samples that make it whole.",
    "LIVE": "A closed history has reached its end: nothing is unanswered, nobody waits, nothing stalled.",
}
"""Statement of each invariant, by id."""
