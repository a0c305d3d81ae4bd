# `make run` shows a living rack; `make check` is the whole gate. Both set up `.venv` first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Agents, ranks and tests are hundreds of processes: each would compile anew all that it imports.
unexport PYTHONDONTWRITEBYTECODE
SCRIPTS := .scripts

.DEFAULT_GOAL := help
.PHONY: help setup run stop check lint types collected frameworks house test quick cases clients swapped rack-test page-test operator-test sim soak storm mutants tables bench-tensors bench-tensors-hosts bench-tensors-kills heal-test bench-elastic bench-groups bench-tuner-live bench-tuner-splits heal-size heal-cost scripts compiled rdma swap limits elsewhere heal-rivals bench-tensors-moves bench-tensors-jobs bench-tensors-lanes bench-tensors-saves bench-sharing gpu-check gpu-pack gpu-rehearsal picture states samples coverage dist deb agent-toml docs reference clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: $(READY) ## make .venv and install everything into it

$(READY): pyproject.toml covey/pyproject.toml tools/pyproject.toml covey/core/version.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: Python 3.11 or newer is needed; name it with PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: this Python cannot make virtual environments; next: apt install python3-venv" >&2; exit 1; }
	@echo "setting up .venv ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check uv 2>/dev/null || true
	@{ $(BIN)/python -c 'import uv' 2>/dev/null && \
	   $(BIN)/python -m uv pip install -q --compile-bytecode --python $(BIN)/python -e ./covey -e '.[dev]' -e ./tools 2>/dev/null; } || \
	 $(BIN)/python -m pip install -q --disable-pip-version-check -e ./covey -e '.[dev]' -e ./tools
	@touch $@

.venv/.torch .venv/.jax .venv/.ansible .venv/.page: .venv/.%: $(READY) # with pip, which finds a CPU build that lies on the machine; uv would fetch gigabytes of CUDA
	@echo "installing $* ..."
	@wanted=$$($(BIN)/python -c 'import sys, tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]])' $*); \
	 if $(BIN)/python -m pip install -q --disable-pip-version-check $$wanted 2>/dev/null; then touch $@; \
	 else echo "$* cannot be installed here: tests that need it are skipped"; fi
	@if test $* = torch && $(BIN)/python -c 'import torch' 2>/dev/null; then $(BIN)/python -m covey.hooks.gate.build || true; fi

$(SCRIPTS)/.ready: $(READY) .venv/.torch .venv/.jax # lies over .venv, which keeps what the gate needs alone
	@echo "setting up $(SCRIPTS) ..."
	@$(BIN)/python -m venv $(SCRIPTS)
	@path='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	 echo "import site; site.addsitedir('$$($(BIN)/python -c "$$path")')" > "$$($(SCRIPTS)/bin/python -c "$$path")/checkout.pth"
	@wanted=$$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["scripts"])'); \
	 $(SCRIPTS)/bin/python -m pip install -q --disable-pip-version-check $$wanted
	@sed "1s|.*|#!$(CURDIR)/$(SCRIPTS)/bin/python|" $(BIN)/torchrun > $(SCRIPTS)/bin/torchrun && chmod +x $(SCRIPTS)/bin/torchrun
	@touch $@

run: $(READY) ## start a rack of four agents on this machine and watch it work
	@$(BIN)/covey-rack run

stop: ## end it: no process, socket or lock is left
	@if test -x $(BIN)/covey-rack; then $(BIN)/covey-rack stop; fi

check: $(READY) ## the whole gate, and what each part of it took (TORCH=1: with the CPU builds of PyTorch and JAX; LONG=1: also what takes long and resembles other tests)
	@for part in lint "-j3 types collected frameworks house" test; do began=$$(date +%s); $(MAKE) --no-print-directory $$part || exit 1; \
	echo "check: $${part#-j3 } took $$(($$(date +%s) - began)) s"; done

frameworks: $(READY) # one after the other: both are written into one environment
	@$(if $(TORCH),$(MAKE) --no-print-directory .venv/.torch && $(MAKE) --no-print-directory .venv/.jax,true)

collected: $(READY) # once, and kept as bytecode, instead of by each of the processes that test; what imports a framework is not there yet
	@$(BIN)/pytest --collect-only -qq --ignore-glob='*jax*' >/dev/null || $(BIN)/pytest --collect-only -qq --ignore-glob='*jax*'

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check -q . || { echo "next: .venv/bin/ruff format ." >&2; exit 1; }

types: $(READY)
	@$(BIN)/mypy

house: $(READY)
	@$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports
	@$(BIN)/python -m tools.reached

test: $(READY) frameworks
	@$(if $(LONG),COVEY_LONG=1 )$(BIN)/pytest -n 5 --dist loadgroup --durations=40; \
	  code=$$?; $(if $(LONG),COVEY_LONG=1 )$(BIN)/python -m tools.again $$code
	@for framework in torch jax; do $(BIN)/python -c "import $$framework" 2>/dev/null || \
	echo "check: left out, since $$framework is not installed: what covey.hooks sees of its scripts (make check TORCH=1)"; done
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null || \
	echo "check: left out, since PyTorch finds no CUDA device: tests marked gpu (make gpu-check)"

quick: $(READY) ## style, and the tests nearest to a change, in 30 s: make quick, or make quick FOLDER=plugins/memory
	@$(BIN)/python -m tools.quick $(FOLDER)

cases: $(READY) ## try every */run.sh of a folder on this checkout, and say what came out: make cases CASES=DIR
	@$(BIN)/python -m tools.cases "$(CASES)"

sim: $(READY) ## replay one simulated rack: make sim SEED=7
	@$(BIN)/covey-chaos sim --seed $(or $(SEED),1)

tables: $(READY) ## every experiment of the papers: bench/results/ (ONLY=jobs-gain for one)
	@$(BIN)/python bench/tables.py $(ONLY)

soak: $(READY) ## play failure stories by seed for a while: make soak SEEDS=1-10000 SECONDS=3600
	@$(BIN)/covey-chaos soak --seeds $(or $(SEEDS),1-2000) --cpu-seconds $(or $(SECONDS),600)

mutants: $(READY) ## plant bugs one by one: do the checks notice? (AREA=memory ONLY=slug SECONDS=300 KNOWN=FILE: only those that changed)
	@$(BIN)/covey-chaos mutants $(if $(KNOWN),--known $(KNOWN)) $(if $(AREA),--area $(AREA)) $(if $(ONLY),--only $(ONLY)) --cpu-seconds $(or $(SECONDS),300)

clients: $(READY) ## clients of a volume's block device that no one here wrote, at length: fio, nbdcopy, nbdinfo, qemu-io, qemu-img, Redis swapped to it (some 4 minutes; the last needs root)
	@$(BIN)/python bench/memory/memory_clients.py $(ARGS)

swapped: $(READY) ## redis, sqlite and a graph in memory that does not fit, swapped to a volume and to this disk, side by side (some 7 minutes, as root)
	@$(BIN)/python bench/memory/memory_programs.py $(ARGS)

rack-test: $(READY) ## kill real agents and byte processes under a job and remote memory
	@$(BIN)/pytest tests/rack

operator-test: $(READY) .venv/.ansible ## as root: the documents' own lines make a rack from the package, people work on it, an operator runs and purges it, the Ansible role makes another; what each step took (some 15 minutes; ARGS=PACKAGE.deb)
	@$(BIN)/python -m tests.rack.operated $(ARGS)

page-test: $(READY) .venv/.page ## the agent's page in headless Chromium: every view by keyboard, WCAG 2.2 AA at three sizes, 1,000 hosts, a real rack (some 6 minutes; apt install chromium)
	@command -v chromium chromium-browser google-chrome >/dev/null || { echo "make: no Chromium is installed; next: apt install chromium" >&2; exit 1; }
	@COVEY_PAGE=1 $(BIN)/pytest tests/page $(ARGS)

storm: $(READY) ## harm real agents on hosts of their own for half an hour: make storm SEED=1 SECONDS=1800
	@$(BIN)/covey-chaos storm --seed $(or $(SEED),1) --seconds $(or $(SECONDS),1800)

bench-tensors: $(READY) .venv/.torch ## rounds of tensors on one host, with Covey and with gloo, side by side (some 5 minutes)
	@$(BIN)/python bench/tensors/tensors_live.py $(ARGS)

heal-test: $(READY) ## ranks of a job on four hosts are killed two hundred times: how long the others stand, the same bits (some 8 minutes)
	@$(BIN)/python bench/healing/healing_kills.py $(ARGS)

bench-groups: $(READY) ## jobs that share two hosts on shaped cards, in turns and thrown together; what the simulator assumes of them (some 4 minutes, as root)
	@$(BIN)/python bench/elastic/turns.py
	@$(BIN)/python bench/elastic/shared_hosts.py
	@$(BIN)/python bench/elastic/groups_live.py $(ARGS)

bench-elastic: $(READY) ## processes of an elastic job change at random, with kills: how long it pauses, the same bits (some 10 minutes, as root)
	@$(BIN)/python bench/elastic/elastic_changes.py $(ARGS)

bench-tuner-live: $(READY) ## the tuner on three real hosts, one of them slow: a step before and after, the same bits (some 3 minutes, as root)
	@$(BIN)/python bench/elastic/tuner_live.py $(ARGS)

bench-tuner-splits: $(READY) ## the four applications on six real hosts: the tuner against every fixed split (as root; some 20 minutes)
	@$(BIN)/python bench/elastic/tuner_splits.py $(ARGS)

heal-size: $(READY) ## a rank with the state of GPT-2 small and Adam is killed, links of 10 Gbit/s: how long until its successor has it (half a minute, 16 GB)
	@$(BIN)/python bench/healing/healing_size.py $(ARGS)

heal-cost: $(READY) .venv/.torch ## what a step costs more because ranks may be lost, when nothing fails, attached and not by turns (some 10 minutes)
	@$(BIN)/python bench/healing/healing_cost.py $(ARGS)

heal-rivals: $(READY) .venv/.torch ## a DDP script whose ranks are killed, with Covey, torchelastic and TorchFT (ARGS="--torchft DIR", where it was installed; some 6 minutes)
	@$(BIN)/python bench/healing/healing_rivals.py $(ARGS)

bench-tensors-kills: $(READY) .venv/.torch ## a DDP script on two hosts whose aggregators are killed twenty times: how long it stands, the same bits (some 15 minutes)
	@$(BIN)/python bench/tensors/tensors_kills.py $(ARGS)

bench-tensors-moves: $(READY) ## all tensors of four models move to other hosts while they train: how long that stands still (an hour; ARGS="--models AlexNet --moves 3": 4 minutes)
	@$(BIN)/python bench/tensors/tensors_moves.py $(ARGS)

bench-tensors-jobs: $(READY) ## jobs that share live aggregators, or have one each: servers, processor time, what each job loses (some 25 minutes)
	@$(BIN)/python bench/tensors/tensors_jobs.py $(ARGS)

bench-tensors-lanes: $(READY) ## rounds a second through an aggregator with one lane and with two, side by side (half a minute)
	@$(BIN)/python bench/tensors/tensors_lanes.py $(ARGS)

bench-tensors-saves: $(READY) ## what a step costs more when a model is saved while ranks go on, and as scripts saved before (a minute)
	@$(BIN)/python bench/tensors/tensors_saves.py $(ARGS)

bench-tensors-hosts: $(READY) .venv/.torch ## the same between four hosts in network namespaces, 1 Gbit/s each (some 5 minutes)
	@$(BIN)/python bench/tensors/tensors_hosts.py $(ARGS)

bench-sharing: $(READY) .venv/.torch ## real scripts on shared cores: ONLY=live (each law, half an hour), rules, away, starts, memory, queue, upgrade, failures ARGS="--rounds 2"
	@$(BIN)/python bench/sharing/sharing_$(or $(ONLY),live).py $(ARGS)

scripts: $(SCRIPTS)/.ready ## forty kinds of training scripts, as their frameworks' manuals have them: each run, seen, preempted, aggregated, healed; the table of what was seen; callbacks, the pages of the first hour and its notebook (three quarters of an hour; ARGS='--only torchrun,JAX')
	@$(BIN)/python bench/scripts/scripts.py --out bench/results/scripts.md $(ARGS)
	@$(SCRIPTS)/bin/python -m pytest -q tests/covey/test_callbacks.py
	@COVEY_LONG=1 $(BIN)/pytest tests/rack/test_first_hour.py

gpu-check: $(READY) ## what is left out elsewhere: tests marked gpu, a rack on the GPU, AntMan's times, with a CUDA build of PyTorch; in parts, JSON after each (ARGS='--only rack --part-s 120')
	@$(BIN)/python tools/gpu/check.py $(ARGS)

gpu-pack: $(READY) ## wheels for a machine with a GPU and no network: .gpu/ (ARGS='--python 3.12'); there: python tools/gpu/check.py --pack .gpu --total-s 540
	@$(BIN)/python tools/gpu/pack.py $(ARGS)

gpu-rehearsal: $(READY) ## the same without a GPU, with another Python: make gpu-pack first, then PYTHON=/path/of/python3.12 that has PyTorch
	@$(BIN)/python tools/gpu/rehearse.py --python $(PYTHON) $(ARGS)

compiled: $(READY) ## compile the byte path of remote memory for this environment, and run its tests so (a compiler; some minutes)
	@$(BIN)/python -m agent.compiled
	@COVEY_COMPILED=1 $(BIN)/pytest -n 2 --dist loadgroup tests/plugins/memory tests/agent/ports/test_bytes.py tests/agent/ports/test_driven.py

rdma: $(READY) ## the tests of remote memory and of tensors over RDMA (SoftRoCE) in an emulated guest of Debian packages: root, a network, some 10 minutes; not a part of check
	@$(BIN)/python -m chaos.guest.main $(ARGS)

swap: $(READY) ## a kernel (User-Mode Linux of Debian's package) swaps to remote memory under a limit, with kills, pages and Redis verified, from a volume with a disk, mirrored and with parity, lost at all lenders, then under systemd, with a disk and mirrored: root, 40 to 90 minutes; ARGS='lost mirror' for some of it; not a part of check
	@$(BIN)/python -m chaos.guest.swap $(ARGS)

limits: $(READY) ## jobs of several users under systemd in a kernel of its own (User-Mode Linux), which limits memory, processors and processes: root, some 10 minutes; not a part of check
	@$(BIN)/python -m chaos.guest.swap --within 1200 --run 'mount -t tmpfs none /tmp && "$$COVEY_PYTHON" -m chaos.guest.modules "$$COVEY_MODULES" overlay bridge veth && echo "+cpu +memory +pids" > /sys/fs/cgroup/cgroup.subtree_control && "$$COVEY_PYTHON" -m pytest -q -p no:cacheprovider tests/rack/test_other_users.py'

elsewhere: $(READY) ## the gate, hosts with our wheels, then the swap, in another release of Debian with its Python, systemd and kernel: RELEASE=trixie RUN='make check'; root, some 40 minutes
	@$(BIN)/python -m chaos.guest.elsewhere $(or $(RELEASE),trixie) $(if $(RUN),--run '$(RUN)')

picture: $(READY) ## draw docs/design/picture.svg anew: the layers, and who imports whom
	@$(BIN)/python -m tools.picture

states: $(READY) ## draw docs/design/STATES.md anew: the states of machines, and what may follow what
	@$(BIN)/python -m tools.states

coverage: $(READY) ## lines and branches run by tests, without tests/rack and tests/chaos; not a part of check, for it takes longer
	@nice -n 10 $(BIN)/pytest -n 2 --dist loadgroup --ignore tests/rack --ignore tests/chaos --cov --cov-report=term

dist: $(READY) ## sdists and wheels of all three into dist/, that of the agent with a compiled byte path and without, tried in an empty environment
	@$(BIN)/python -m tools.wheels dist

deb: $(READY) ## a Debian package for this release, with a compiled byte path: dist/covey_VERSION_amd64.deb (the first time some minutes: it compiles)
	@$(BIN)/python -m tools.deb dist

agent-toml: $(READY) ## write systemd/agent.toml anew: every setting, its default, its words
	@$(BIN)/python -m tools.annotated

docs: $(READY) ## build the site of docs/ into site/, every link checked, with API pages from docstrings in site/api/
	@$(BIN)/python -m tools.pages site

samples: $(READY) ## add what tests/compatibility lacks: a sample of each format as this version writes it; what agentctl answers to slips, and the screens of agentctl top
	@$(BIN)/python -m tests.compatibility.samples
	@$(BIN)/python -m tests.cli.test_typos
	@$(BIN)/python -m tests.cli.test_top

reference: $(READY) ## write docs/reference/ anew: agentctl, HTTP, Python API, exit codes, as the code has them now
	@$(BIN)/python -m tools.pages

clean: ## remove .venv and everything made by tools
	rm -rf .venv .scripts .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info covey/*.egg-info tools/*.egg-info build dist site
