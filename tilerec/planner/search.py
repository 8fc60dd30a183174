"""The search. (draft)"""

from __future__ import annotations

import numpy as np

from tilerec.planner.bound import Kinds, averages, certify, kinds_of
from tilerec.planner.improve import exchange
from tilerec.planner.instance import Instance, Ints, Solution, Status, evaluate
from tilerec.planner.pack import Packing, Rule, pack
from tilerec.planner.relaxed import NEVER, Relaxed, least
import time

ALPHAS = (1, 2, 3, 4, 6, 8, 12, 16, 32)

def choose(relaxed, kinds, alpha, beta):
    instance = relaxed.instance
    average = averages(relaxed, kinds.dual.option)
    limit = (average + average.sum() // 50) // alpha
    small = (instance.cost <= limit).all(2) | relaxed.everywhere
    for m in range(instance.tiers):
        small &= (instance.memory[:, :, m] * beta <= relaxed.room[:, m].max()) | relaxed.everywhere
    small &= kinds.usable
    small = np.where(small.any(1, keepdims=True), small, kinds.usable)
    return least(np.where(small, relaxed.totals, NEVER), relaxed.memory)

def solve(instance: Instance, *, effort: int = 1, debug=False) -> Solution:
    t0 = time.perf_counter()
    relaxed = Relaxed(instance)
    proof = relaxed.impossible()
    assert proof is None, proof
    kinds = kinds_of(relaxed)
    best = None
    if debug: print("kinds", time.perf_counter() - t0, kinds[0].bound(relaxed)/1e9)
    seen = set()
    for alpha in ALPHAS:
      for beta in (1, 2, 4, 10, 30):
        dual = choose(relaxed, kinds[0], alpha, beta)
        phi = -(-(dual.value + relaxed.base_total) // instance.ranks)
        if dual.short >= 0 or (best is not None and phi >= best.cost):
            if debug: print(alpha, beta, "skip", dual.short, phi/1e9)
            break
        key = dual.option.tobytes()
        if key in seen: continue
        seen.add(key)
        done = False
        for rule in (Rule.TIME, Rule.BOTH, Rule.MEMORY):
            t1 = time.perf_counter()
            packing = pack(relaxed, dual.option, rule)
            t2 = time.perf_counter()
            if packing is None:
                if debug: print(alpha, beta, rule, "none", t2-t1)
                continue
            done = True
            e0 = evaluate(instance, packing.option, packing.places)
            packing, cost = exchange(relaxed, packing, 60)
            t3 = time.perf_counter()
            e = evaluate(instance, packing.option, packing.places)
            if debug: print(alpha, beta, rule, "phi %.4f pack %.4f ex %.4f  times %.3f %.3f" % (phi/1e9, e0.cost/1e9, e.cost/1e9, t2-t1, t3-t2), (e.stage/1e9).round(4), (averages(relaxed, packing.option)/1e9).round(4))
            if best is None or e.cost < best.cost:
                best = e
            if e.cost < phi*1.05: break
        if done: break
    t4 = time.perf_counter()
    bound = certify(relaxed, kinds[0], best.cost)
    if debug: print("bound", bound/1e9, time.perf_counter() - t4)
    return evaluate(instance, best.option, best.places, best.rows, bound)
