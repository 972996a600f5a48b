# SPDX-License-Identifier: Apache-2.0
"""`devproxy completion bash|zsh`: what a shell needs to complete verbs, options, choices and names, out of the parser.

    eval "$(devproxy completion bash)"          in ~/.bashrc
    eval "$(devproxy completion zsh)"           in ~/.zshrc, behind compinit

Names of jobs are asked for when they are wanted: `devproxy completion jobs`.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from devproxy import records, runtime

SHELLS = ("bash", "zsh")
JOBS = "jobs"
JOB_NAMES = ("JOB", "IMAGE")  # metavars; a job's name means its newest image

# Of the word before the cursor the option's choices; else options where the word begins with "-"; else what may stand here.
BASH = """\
_devproxy() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} verb= i
  COMPREPLY=()
  case ${COMP_WORDS[0]} in *devproxy-run) verb=run ;; esac
  for ((i = 1; i < COMP_CWORD; i++)); do
    case ${COMP_WORDS[i]} in
      --) return ;;  # the job's own words
      -*) ;;
      *) verb=${verb:-${COMP_WORDS[i]}} ;;
    esac
  done
  local words= options= jobs=
  case $verb in
@CASES@
  esac
  case "$verb $before" in
@CHOICES@
    *) if [[ $word == -* ]]; then words=$options; fi ;;
  esac
  if [[ -n $jobs && $word != -* ]]; then words+=" $(devproxy completion jobs 2>/dev/null)"; fi
  if [[ -n $words ]]; then COMPREPLY=($(compgen -W "$words" -- "$word")); fi
}
"""
# zsh runs bash's function as it is.
ZSH_HEAD = "autoload -Uz bashcompinit && bashcompinit\n"
TAIL = "complete -o default -F _devproxy devproxy devproxy-run\n"


@dataclass(frozen=True)
class Words:
    """What may stand behind a verb. choices: by option. A word beside jobs is one of the verb's own."""

    options: list[str]
    choices: dict[str, list[str]]
    words: list[str]
    jobs: bool


def words_of(parser: argparse.ArgumentParser) -> Words:
    options: list[str] = []
    choices: dict[str, list[str]] = {}
    words: list[str] = []
    jobs = False
    for action in parser._actions:
        given = [str(choice) for choice in action.choices or ()]
        if action.option_strings:
            options += [name for name in action.option_strings if name.startswith("--")]
            if given:
                choices |= dict.fromkeys(action.option_strings, given)
        else:
            words += given
            jobs |= action.metavar in JOB_NAMES
    return Words(options, choices, words, jobs)


def words_of_help(text: str) -> Words:
    """devproxy-run has no parser of argparse's, which every job's start would wait for; its help says all of it."""
    found = re.findall(r"^  (--[a-z-]+) ?(\S*)", text, re.MULTILINE)
    choices = {name: value.split("|") for name, value in found if "|" in value}
    return Words(list(dict.fromkeys(name for name, _ in found)), choices, [], False)


def script(
    shell: str,
    top: argparse.ArgumentParser,
    verbs: Mapping[str, argparse.ArgumentParser],
    run_help: str,
) -> str:
    """For eval. Raises KeyError for a shell that is none of SHELLS."""
    cases, chosen = [], []
    everything = {"": words_of(top)} | {verb: words_of(parser) for verb, parser in verbs.items()}
    everything["run"] = words_of_help(run_help)
    for verb, words in everything.items():
        own = [*words.words, *(verbs if verb == "help" else ())]
        cases.append(
            f"    {shlex.quote(verb)}) options={shlex.quote(' '.join(words.options))}"
            f" words={shlex.quote(' '.join(own))} jobs={'1' if words.jobs else ''} ;;"
        )
        for option, values in words.choices.items():
            chosen.append(f'    "{verb} {option}") words={shlex.quote(" ".join(values))} jobs= ;;')
    text = BASH.replace("@CASES@", "\n".join(cases)).replace("@CHOICES@", "\n".join(chosen))
    return {"bash": "", "zsh": ZSH_HEAD}[shell] + text + TAIL


def job_names() -> list[str]:
    """Those that live, and those that are remembered."""
    return sorted({name for name, _, _ in runtime.list_jobs()} | set(records.names()))
