// The loop of cpu_adam.cpp over vectors of one instruction set; included once per set, inside its namespace, which defines
//
//   TARGET                  function attribute that allows the instructions
//   WIDTH, Vector           floats of a vector, its type
//   load store splat add sub mul div root            on vectors; no fused multiply-add, see "Bits" in cpu_adam.cpp
//   with_sign(size, x)                               size with the sign of x; 0 where x is 0
//   store_low<kind>(uint16_t*, a, b)                 two vectors, rounded to 16 bits
//
// No include guard: that is the point.

struct Constants {
    Vector grad_scale, one_minus_beta1, beta2, one_minus_beta2, root_scale, eps, decay, step_size;
};

template <Rule rule>
TARGET static inline Vector updated(const Constants& c, float* p, const float* g, float* m, float* v) {
    const Vector grad = mul(load(g), c.grad_scale);
    Vector new_p;
    if constexpr (rule == Rule::adamw) {
        const Vector old_m = load(m);
        const Vector new_m = add(old_m, mul(sub(grad, old_m), c.one_minus_beta1));
        const Vector new_v = add(mul(load(v), c.beta2), mul(mul(grad, grad), c.one_minus_beta2));
        const Vector denominator = add(mul(root(new_v), c.root_scale), c.eps);
        new_p = sub(mul(load(p), c.decay), mul(div(new_m, denominator), c.step_size));
        store(m, new_m);
        store(v, new_v);
    } else if constexpr (rule == Rule::lion) {
        const Vector old_m = load(m), change = sub(grad, old_m);
        const Vector direction = add(old_m, mul(change, c.one_minus_beta1));
        new_p = sub(mul(load(p), c.decay), with_sign(c.step_size, direction));
        store(m, add(old_m, mul(change, c.one_minus_beta2)));
    } else {
        const Vector old_p = load(p), decayed = add(grad, mul(old_p, c.decay));
        const Vector sum = add(load(m), mul(decayed, decayed));
        new_p = sub(old_p, mul(div(decayed, add(root(sum), c.eps)), c.step_size));
        store(m, sum);
    }
    store(p, new_p);
    return new_p;
}

template <Rule rule, Low kind>
TARGET static void update(const Rates& r, const Span& s) {
    const Constants c{splat(r.grad_scale), splat(r.one_minus_beta1), splat(r.beta2), splat(r.one_minus_beta2),
                      splat(r.root_scale), splat(r.eps), splat(r.decay), splat(r.step_size)};
    int64_t i = 0;
    for (; i + 2 * WIDTH <= s.count; i += 2 * WIDTH) {
        const Vector a = updated<rule>(c, s.p + i, s.g + i, s.m + i, s.v + i);
        const Vector b = updated<rule>(c, s.p + i + WIDTH, s.g + i + WIDTH, s.m + i + WIDTH, s.v + i + WIDTH);
        if constexpr (kind != Low::none) store_low<kind>(s.low + i, a, b);
    }
    scalar::update<rule, kind>(r, s.from(i));
}
