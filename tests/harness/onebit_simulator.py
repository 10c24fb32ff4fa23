"""Optimizers that exchange one bit an element, on P workers that a loop plays: each parameter by itself,
whole, with the formulas of the papers. The oracle of the real ranks."""

import math

import torch

from megatron_ds.extensions.onebit.phases import Exchange


class SimulatedMean:
    """The compressed mean over workers of one parameter.

    chunks: the servers that have a scale of their own, as in DeepSpeed; 1: one scale for the parameter, and
    vectors are not compressed
    """

    def __init__(self, shape, workers, chunks=1):
        self.worker_errors = [torch.zeros(shape) for _ in range(workers)]
        self.server_error = torch.zeros(shape)
        self.chunks, self.scales = chunks, []
        self.is_exact = len(shape) < 2 and chunks == 1

    def __call__(self, xs):
        if len(xs) == 1 or self.is_exact:
            return sum(xs[1:], xs[0]) / len(xs)
        ys = [x + error for x, error in zip(xs, self.worker_errors)]
        live = torch.stack([live_elements(y) for y in ys]).any(0)
        sent, self.scales = [], []
        for i, y in enumerate(ys):
            signs, scale = compress(y, live)
            self.worker_errors[i] = y - signs
            sent.append(signs)
            self.scales.append(scale)
        z = self.server_error + torch.where(
            live, sum(sent[1:], sent[0]) / len(sent), 0.0
        )
        parts = [
            compress(part, mask)
            for part, mask in zip(z.chunk(self.chunks), live.chunk(self.chunks))
        ]
        result = torch.cat([signs for signs, _ in parts])
        self.scales += [scale for _, scale in parts]
        self.server_error = z - result
        return result


def live_elements(y):
    """Elements of rows with an element that is not zero; a vector is one row."""
    rows = (
        (y != 0).view(len(y), -1).any(1)
        if y.dim() > 1
        else (y != 0).any().expand(len(y))
    )
    return rows.view(-1, *[1] * (y.dim() - 1)).expand(y.shape)


def compress(y, live):
    """(±s where live, s)."""
    count = int(live.sum())
    scale = (
        y.double().norm().float() / torch.tensor(math.sqrt(count)).float()
        if count
        else torch.zeros(())
    )
    return torch.where(live, torch.where(y >= 0, scale, -scale), 0.0), scale


class SimulatedRun:
    """A run of P workers. weights: name → tensor. numbers: lr, betas, eps, weight_decay, clip, corrects, and
    of LAMB min_coeff, max_coeff, coeff_beta, factor_max, factor_min, factor_threshold."""

    def __init__(self, kind, phases, weights, workers, **numbers):
        self.kind, self.phases, self.workers, self.numbers = (
            kind,
            phases,
            workers,
            numbers,
        )
        self.weights = {name: w.clone() for name, w in weights.items()}
        zeros = lambda: {name: torch.zeros_like(w) for name, w in weights.items()}
        self.m = [zeros() for _ in range(workers)]
        self.v, self.fresh, self.sums = (
            zeros(),
            zeros(),
            [zeros() for _ in range(workers)],
        )
        self.means = {
            name: SimulatedMean(w.shape, workers) for name, w in weights.items()
        }
        self.ratio, self.factor = (
            dict.fromkeys(weights, 0.0),
            dict.fromkeys(weights, 1.0),
        )
        self.rates, self.step_count, self.grad_norm, self.noises = 0.0, 0, 0.0, []

    def step(self, shares):
        """shares: of each worker, name → its part of the sum of gradients."""
        self.step_count += 1
        exchange, before = (
            self.phases.at(self.step_count),
            self.phases.at(self.step_count - 1),
        )
        local = (Exchange.SUM, Exchange.NONE)
        if (
            exchange is Exchange.MOMENTUM != before
            or exchange in local
            and before not in local
        ):
            self.means = {
                name: SimulatedMean(w.shape, self.workers)
                for name, w in self.weights.items()
            }
        grads = self._clipped(shares, exchange)
        decay = 1 - self.numbers["lr"] * self.numbers["weight_decay"]
        correction = self._corrections()[0]
        rate = self.numbers["lr"] / correction
        self.rates += rate if exchange in local else 0.0
        for name, w in self.weights.items():
            previous = self.m[0][name].clone()
            self._moments(name, [of_worker[name] for of_worker in grads], exchange)
            if exchange in local:
                w.mul_(decay)
                for sums, m in zip(self.sums, self.m):
                    sums[name] += rate * m[name]
                if exchange is Exchange.SUM:
                    self._exchange_sums(name)
            elif self.kind == "onebit_lamb":
                self._lamb(name, previous, exchange)
            else:
                w.mul_(decay).sub_(rate * self.m[0][name] / self._denominator(name))
        if exchange is Exchange.SUM:
            self.rates = 0.0

    def weights_of(self, worker):
        """The weights with which a worker computes."""
        return {
            name: w - self.sums[worker][name] / self._denominator(name)
            for name, w in self.weights.items()
        }

    def _clipped(self, shares, exchange):
        total = {
            name: sum(of_worker[name] for of_worker in shares) for name in self.weights
        }
        square = lambda grads: sum(g.double().square().sum() for g in grads.values())
        matrices = lambda grads: {name: g for name, g in grads.items() if g.dim() > 1}
        if exchange is Exchange.FULL:
            self.grad_norm = math.sqrt(square(total))
            if self.workers > 1:
                excess = (
                    self.workers
                    * sum(square(matrices(g)) for g in shares)
                    / self.grad_norm**2
                )
                self.noises.append(
                    min(max(float((excess - 1) / (self.workers - 1)), 0.0), 1.0)
                )
        else:
            noise = 0.0
            for count, share in enumerate(self.noises, 1):
                noise += (share - noise) * max(1 / count, 0.05)
            self.grad_norm = math.sqrt(
                self.workers
                * sum(square(g) for g in shares)
                / (1 + (self.workers - 1) * noise)
            )
        divisor = max(1.0, (self.grad_norm + 1e-6) / self.numbers["clip"])
        if exchange is Exchange.FULL:
            return [{name: g / divisor for name, g in total.items()}] * self.workers
        return [
            {name: g * (self.workers / divisor) for name, g in of_worker.items()}
            for of_worker in shares
        ]

    def _moments(self, name, grads, exchange):
        beta1, beta2 = self.numbers["betas"]
        if exchange is Exchange.GRADIENT:
            grads = [self.means[name](grads)] * self.workers
        news = [beta1 * m[name] + (1 - beta1) * g for m, g in zip(self.m, grads)]
        if exchange is Exchange.MOMENTUM:
            news = [self.means[name](news)] * self.workers
        for m, new in zip(self.m, news):
            m[name] = new.clone()
        if exchange is Exchange.FULL:
            self.v[name] = beta2 * self.v[name] + (1 - beta2) * grads[0].square()
            self.fresh[name] = self.v[name].clone()

    def _exchange_sums(self, name):
        mean = self.means[name]([sums[name] for sums in self.sums])
        self.weights[name] -= mean / self._denominator(name)
        for m, sums in zip(self.m, self.sums):
            m[name], sums[name] = mean / self.rates, torch.zeros_like(mean)

    def _corrections(self):
        beta1, beta2 = self.numbers["betas"]
        updates = self.phases.variance_updates(self.step_count)
        return (
            (1 - beta1**self.step_count, 1 - beta2**updates)
            if self.numbers["corrects"]
            else (1.0, 1.0)
        )

    def _denominator(self, name):
        second = self._corrections()[1] if self.kind != "onebit_lamb" else 1.0
        root = (self.v[name] / second).sqrt()
        return torch.where(root > 0, root + self.numbers["eps"], math.inf)

    def _lamb(self, name, previous, exchange):
        n, w, m = self.numbers, self.weights[name], self.m[0][name]
        (beta1, beta2), (first, second) = n["betas"], self._corrections()
        bare = m / self._denominator(name)
        u = bare + n["weight_decay"] * w
        if exchange is Exchange.FULL:
            ratio = float(w.norm() / u.norm()) if w.norm() > 0 and u.norm() > 0 else 1.0
            ratio = min(max(ratio, n["min_coeff"]), n["max_coeff"])
            if ratio != 1:
                self.ratio[name] = (
                    n["coeff_beta"] * self.ratio[name] + (1 - n["coeff_beta"]) * ratio
                )
        else:
            g = (m - beta1 * previous) / (1 - beta1)
            self.fresh[name] = beta2 * self.fresh[name] + (1 - beta2) * g.square()
            known = self.v[name] > 0
            excess = (self._denominator(name) / (self.fresh[name].sqrt() + n["eps"]))[
                known
            ]
            share = min(1.0, float(bare.norm() / u.norm())) if u.norm() > 0 else 1.0
            factor = (
                float(excess.max()) * share + 1 - share if len(excess) else 1 - share
            )
            factor = min(max(factor, n["factor_min"]), n["factor_max"])
            last, change = self.factor[name], n["factor_threshold"]
            self.factor[name] = min(
                max(factor, last * (1 - change)), last * (1 + change)
            )
            ratio = self.ratio[name] * self.factor[name]
        w.sub_(n["lr"] * second**0.5 / first * ratio * u)
