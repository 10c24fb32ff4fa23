"""Lion, AdEMAMix, LAMB and Muon of whole parameters, from the formulas of their papers, in double precision."""

import math

import torch


class Plain(torch.optim.Optimizer):
    """Updates each parameter in double precision by `formula`, which returns the new p."""

    def __init__(self, params, lr, betas, weight_decay=0.0, **more):
        super().__init__(
            params, dict(lr=lr, betas=betas, weight_decay=weight_decay, **more)
        )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("t", 0)
                    state["t"] += 1
                    p.copy_(
                        self.formula(
                            state.setdefault("p", p.double()),
                            p.grad.double(),
                            state,
                            group,
                        )
                    )

    def formula(self, p, g, state, group):
        raise NotImplementedError


class PlainLion(Plain):
    """Chen et al. 2023, algorithm 2."""

    def formula(self, p, g, state, group):
        beta1, beta2 = group["betas"]
        m = state.get("m", torch.zeros_like(p))
        sign = torch.sign(beta1 * m + (1 - beta1) * g)
        state["m"] = beta2 * m + (1 - beta2) * g
        state["p"] = p * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * sign
        return state["p"]


class PlainAdEMAMix(Plain):
    """Pagliardini et al. 2024, algorithm 1; warmup: of alpha and of beta3, or None."""

    def __init__(self, params, lr, betas, weight_decay, alpha, eps=1e-8, warmup=None):
        super().__init__(
            params, lr, betas, weight_decay, alpha=alpha, eps=eps, warmup=warmup
        )

    def formula(self, p, g, state, group):
        (beta1, beta2, beta3), t = group["betas"], state["t"]
        alpha, warmup = group["alpha"], group["warmup"]
        if warmup is not None and t < warmup:
            alpha *= t / warmup
            # The half-life of the slow momentum is a mean of those of beta1 and beta3.
            first, last = (math.log(0.5) / math.log(b + 1e-8) for b in (beta1, beta3))
            beta3 = 0.5 ** (1 / ((1 - t / warmup) * first + t / warmup * last))
        zero = torch.zeros_like(p)
        state["m"] = beta1 * state.get("m", zero) + (1 - beta1) * g
        state["s"] = beta3 * state.get("s", zero) + (1 - beta3) * g
        state["v"] = beta2 * state.get("v", zero) + (1 - beta2) * g * g
        step = state["m"] / (1 - beta1**t) + alpha * state["s"]
        step = step / ((state["v"] / (1 - beta2**t)).sqrt() + group["eps"])
        state["p"] = p - group["lr"] * (step + group["weight_decay"] * p)
        return state["p"]


class PlainLamb(Plain):
    """You et al. 2019, algorithm 2 (paper=True), or as DeepSpeed has it; the ratio is in state["r"]."""

    def __init__(
        self,
        params,
        lr,
        betas,
        weight_decay=0.0,
        eps=1e-8,
        paper=False,
        bounds=(0.01, 10.0),
    ):
        super().__init__(
            params, lr, betas, weight_decay, eps=eps, paper=paper, bounds=bounds
        )

    def formula(self, p, g, state, group):
        (beta1, beta2), t = group["betas"], state["t"]
        state["m"] = m = beta1 * state.get("m", torch.zeros_like(p)) + (1 - beta1) * g
        state["v"] = v = (
            beta2 * state.get("v", torch.zeros_like(p)) + (1 - beta2) * g * g
        )
        if group["paper"]:
            u, factor = (
                m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"]),
                1.0,
            )
        else:
            u, factor = (
                m / (v.sqrt() + group["eps"]),
                (1 - beta2**t) ** 0.5 / (1 - beta1**t),
            )
        u = u + group["weight_decay"] * p
        low, high = group["bounds"]
        state["r"] = min(
            max(float(p.norm() / u.norm()) if p.norm() and u.norm() else 1.0, low), high
        )
        state["p"] = p - group["lr"] * factor * state["r"] * u
        return state["p"]


class PlainMuon(Plain):
    """Jordan et al. 2024 without Nesterov's momentum, on a matrix of `columns` columns: the polynomials
    (a, b, c) of `coefficients` are of its singular values."""

    def __init__(
        self, params, lr, coefficients, columns, momentum=0.9, weight_decay=0.0
    ):
        super().__init__(
            params,
            lr,
            (momentum, 0),
            weight_decay,
            coefficients=coefficients,
            columns=columns,
        )

    def formula(self, p, g, state, group):
        mu = group["betas"][0]
        state["m"] = m = mu * state.get("m", torch.zeros_like(p)) + (1 - mu) * g
        matrix = m.view(-1, group["columns"])
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        s = s / s.norm()
        for a, b, c in group["coefficients"]:
            s = a * s + b * s**3 + c * s**5
        update = (u * s @ vh).view_as(p) * max(matrix.shape) ** 0.5
        state["p"] = (
            p * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * update
        )
        return state["p"]
