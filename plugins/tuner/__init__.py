"""The tuner: how many hosts of a job compute, how many hold the model, and which host holds which part.
Not live: it has no service, so no agent loads it; `covey-sim tuner` runs its machine on modelled hosts.

Paper: Cruise, in Woo-Yeon Lee, chapter 3, Seoul National University 2020. A job with parameter servers splits its hosts
into workers, which hold training data, and servers, which hold the model. Too few workers and computing takes long; too
few servers, and all hosts wait for the network. The best split depends on the algorithm, on its parameters and on the
hosts, and is not known before the job runs. So the tuner measures some mini-batches, finds the split with the
shortest epoch, and moves the job there without stopping it, if that saves at least 5 %.

    mini-batches timed -> enough of them? -> search -> worth 5 %? -> a plan: add, switch, move, delete -> steps, done

The paper finds a split of unequal hosts with a solver for mixed integer programs: 37 s for 32 hosts, and to within a
gap of 40 %. None is needed. For fixed roles the best shares have a closed form, so only the roles are to be searched:
exactly when the hosts are of few kinds, by descent from good starts when they all differ (`policy/search.py`).

Words. *worker*, *server*: the role of one host. *block*: a part of the training data or of the model; the unit in which
both move; it has one owner at any instant. *mini-batch*: what a worker computes between two visits to the servers.

    messages   about measurements, and the steps of a plan                 policy   cost, search, whole blocks, plan
    machine    waits for mini-batches, decides, walks a plan to its end

This plugin has no service: it decides, and nothing on a live host asks it yet.
"""
