# SPDX-License-Identifier: Apache-2.0
"""Everything that is to be found out on a GPU, in one command: stages from the cheapest fact to the whole job.

    python3 gpu_check.py [--out DIR] [--driver PATH] [--limit SECONDS] [--only STAGE,... | --second | --third] [--list]

Standard library only, Python 3.11 or later, no network. It lies in the bundle that scripts/gpu_bundle.py makes, or is
given one by --bundle. Each stage is a process of its own with a time limit: when one hangs or dies, its figures so far
are kept and the next one begins; each leaves the later ones the least time that they need. DIR ($OUT, else build/gpu-check)
gets

    gpu-check.json    `stages`: name, status (ok, failed, refused, not_run), seconds, figures, text; written after each.
                      `next`: the command for what was not run or was cut short
    gpu-check.log     what they said
    gpu-check-logs.tar.gz    the logs of the programs and jobs, their ends
    torch-ops.json    of every op of torch that was compared and is not bitwise equal: why

failed: something was wrong, or hung, or died. refused: something that the stage needs is not here, named in its text.
not_run: no time was left, or it was not asked for. Exit code 0 only if every stage that ran is ok.

    command     the command line                        campaign    each stage in a process of its own, with its limit
    stage       which stages there are, in which order  ends        how one ends
    setup       what it knows of the machine            report      its figures
    running     programs that it starts                 driver      the genuine driver by ctypes
    torch_sides, torch_compare      torch's programs, natively and through the proxy, compared
    profile     where threads spend their time
    subjects, gpt2, checkpoints     whole jobs, and what is done with them
    stages/     the stages, by family
"""
