#!/bin/sh
# The whole story in a few minutes, by commands that anybody could type: plan a small language model on the King James
# Bible under a budget of memory, check the plan, compare it with plain PyTorch for equal time, train by it, look.
# make demo runs it. Without a network the text is the source of this Python.
set -eu
name=${DEMO_NAME:-demo-$(date +%Y%m%d-%H%M%S)}
plan=runs/$name-plan.toml
mkdir -p runs

show() {
    printf '\n%s\n$ thrifty' "$1"
    shift
    for word; do
        case $word in *' '*) printf ' "%s"' "$word" ;; *) printf ' %s' "$word" ;; esac
    done
    echo
    thrifty "$@"
}

set --
show "Real text: public domain, fetched once" data get kjv || set -- --data python-stdlib
show "What pays, and fits" plan plain "$@" --memory 800MB --allow different --seconds 120 --out "$plan"
show "Does it still compute what it promises?" check "$plan"
# 7 pairs are the fewest that can have a verdict
status=0
show "Is it better than plain PyTorch, in equal time?" compare plain --variant "planned: $plan" "$@" \
    --budget "${COMPARISON_BUDGET:-4s}" --seeds 7 --rate-trials 1 --name "$name-comparison" || status=$?
case $status in
    0) verdict=runs/$name-comparison/report.html ;;
    2 | 3) verdict="none, as said above: a plan may be plain PyTorch as it is, and a machine too busy for equal times" ;;
    *) exit "$status" ;;
esac
show "Then train by it" train "$plan" --budget "${TRAIN_BUDGET:-1min}" --name "$name"
show "Look at the run" report "runs/$name"
show "and at what it learned" sample "runs/$name" --prompt "And the LORD said" --tokens 60
printf '\nThe verdict, with charts: %s\nThe run:                  %s\n' "$verdict" "runs/$name/report.html"
