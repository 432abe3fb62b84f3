// How a block walks over the numeric tiles of keys: at once, by warpgroups, or in parts. Part of attention_forward.cu.
#pragma once

// What a tile whose S is in registers adds to l and O.
inline void add_tile(Rows& rows, float (&s)[M][N][4], unsigned v_shared, int j, int first) {
    const int k0 = j * KEYS;
    rows.at.tile = j;
    float alpha[R], sum[R];
    Weights<product_pv, M, N> w;
    rows.scores(s, k0, min(k0 + KEYS, rows.shape.tk));
    bool is_narrow = has_narrow;
#pragma unroll
    for (int r = 0; r < R; r++) {
        bool row_is_narrow;
        alpha[r] = rows.take_maximum(s, r, row_is_narrow);
        sum[r] = order_fa2 ? rows.l[r] : 0.f;
        is_narrow &= row_is_narrow;
    }
    is_narrow = __all_sync(0xFFFFFFFFu, is_narrow);
    auto weigh = [&](int j0, int j1) {
        if (has_narrow && is_narrow) rows.weigh<has_narrow>(w, s, k0, alpha, sum, j0, j1);
        else rows.weigh<false>(w, s, k0, alpha, sum, j0, j1);
    };
    if constexpr (WARPGROUP && (order_fa2 || C <= 16)) {
        // Each 16 keys of P̄ go to the tensor core while the next are on their way.
        float pv[M][C][4];
        rows.each_output(first, [&](float& o, int i, int c, int e, const At& here) {
            pv[i][c][e] = rows.start(o, alpha[2 * i + e / 2], here);
        });
#pragma unroll
        for (int k = 0; k < N / 2; k++) {
            weigh(2 * k, 2 * k + 2);
            begin_step<product_pv, VTile>(pv, w, v_shared, 0, k);
        }
        end_steps(pv);
        rows.each_output(first, [&](float& o, int i, int c, int e, const At& here) {
            o = rows.joined(o, alpha[2 * i + e / 2], pv[i][c][e], here);
        });
    } else {
        weigh(0, N);
        rows.add_values(w, v_shared, alpha, first);
    }
#pragma unroll
    for (int r = 0; r < R; r++) rows.add_row_sum(r, sum[r]);
}

// The number of the tile at a step.
inline int tile_at(int step, int count) { return order_fa2 ? count - 1 - step : step; }

// Tiles executed at once, the next one on its way meanwhile.
void short_tiles(Rows& rows, const Heads& heads, unsigned shared, int end) {
    const int count = (end + KEYS - 1) / KEYS;
    auto load = [&](int step) {
        const int k0 = tile_at(step, count) * KEYS, k1 = min(k0 + KEYS, rows.shape.tk);
        const unsigned to = shared + step % STAGES * (KTile::bytes + VTile::bytes);
        heads.load_keys(to, k0, k1);
        heads.load_values(to + KTile::bytes, k0, k1);
        copy_commit();
    };
    if (count > 0) load(0);
    for (int step = 0; step < count; step++) {
        const int j = tile_at(step, count);
        copy_wait<0>();
        publish();
        if (STAGES == 2 && step + 1 < count) load(step + 1);
        if (j * KEYS < rows.end) {
            const unsigned k_shared = shared + step % STAGES * (KTile::bytes + VTile::bytes);
            float s[M][N][4];
            rows.multiply(s, k_shared);
            add_tile(rows, s, k_shared + KTile::bytes, j, heads.first);
        }
        if (STAGES == 1 && step + 1 < count) {
            __syncthreads();
            load(step + 1);
        }
    }
}

// ---- tiles longer than KEYS, and `plain`: gone through for the maximum, then again for the rest

// Brings keys k0 to k0 + KEYS, those of V too where asked, to shared memory; zeros from k1 on.
template <bool values>
void load_chunk(const Rows& rows, const Heads& heads, unsigned shared, int k0, int k1) {
    __syncthreads();
    heads.load_keys(shared, k0, k1);
    if constexpr (values) heads.load_values(shared + KTile::bytes, k0, k1);
    copy_commit();
    copy_wait<0>();
    publish();
}

// m after the tile of keys k0 to k1, of which those from `seen` on are masked in all rows of the block.
void long_maximum(Rows& rows, const Heads& heads, unsigned shared, int k0, int k1, int seen, float (&m_new)[R]) {
    const bool visits = k0 < rows.end;
    float s[M][N][4], r_m[R];
    int n[R];
#pragma unroll
    for (int r = 0; r < R; r++) r_m[r] = -INF, n[r] = 0;
    for (int chunk = k0; chunk < min(k1, seen); chunk += KEYS) {
        load_chunk<false>(rows, heads, shared, chunk, k1);
        if (!visits) continue;
        rows.multiply(s, shared);
        rows.scores(s, chunk, k1);
#pragma unroll
        for (int r = 0; r < R; r++) {
            const float x = rows.maximum(s, r, r_m[r]);
            if constexpr (counts_ties && fix::epsilon == 0)
                n[r] = rows.count_ties(s, r, x) + (x == r_m[r] ? n[r] : 0);
            r_m[r] = x;
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        const float x = quad_max(r_m[r]);
        if (x != r_m[r]) n[r] = 0;
        r_m[r] = x;
    }
    if constexpr (fix::epsilon != 0) {
        for (int chunk = k0; chunk < min(k1, seen); chunk += KEYS) {
            load_chunk<false>(rows, heads, shared, chunk, k1);
            if (!visits) continue;
            rows.multiply(s, shared);
            rows.scores(s, chunk, k1);
#pragma unroll
            for (int r = 0; r < R; r++) n[r] += rows.count_ties(s, r, r_m[r]);
        }
    }
    if (!visits) return;
#pragma unroll
    for (int r = 0; r < R; r++) m_new[r] = rows.new_maximum(r, r_m[r], counts_ties ? quad_sum(n[r]) : 0);
}

// `plain`: l of the rows, from all keys.
void plain_row_sum(Rows& rows, const Heads& heads, unsigned shared, int seen) {
    float s[M][N][4], sum[R];
#pragma unroll
    for (int r = 0; r < R; r++) sum[r] = 0;
    for (int chunk = 0; chunk < seen; chunk += KEYS) {
        load_chunk<false>(rows, heads, shared, chunk, rows.shape.tk);
        rows.multiply(s, shared);
        rows.scores(s, chunk, rows.shape.tk);
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float2 x = rows.probabilities<false>(s, r, j, chunk);
                sum[r] += x.x;
                sum[r] += x.y;
            }
    }
#pragma unroll
    for (int r = 0; r < R; r++) rows.l[r] = rnd<attn_l>(quad_sum(sum[r]), rows.at(rows.row(r)));
}

// `plain`: P of a row = P̄ / l, 0 where masked and in empty rows.
void plain_weigh(const Rows& rows, Weights<product_pv, M, N>& w, const float (&s)[M][N][4], int r, int k0) {
    const float l = rows.l[r], inverse = 1.f / l;
    const int last = l == 0 && rows.raw_maximum(r) == -INF ? -1 : rows.shape.last_key(rows.row(r)) - k0;
#pragma unroll
    for (int j = 0; j < N; j++) {
        float2 x = rows.probabilities<false>(s, r, j, k0);
        x = order_fa2 ? make_float2(x.x * inverse, x.y * inverse) : make_float2(x.x / l, x.y / l);
        if (rows.column(j, 0) > last) x.x = 0;
        if (rows.column(j, 1) > last) x.y = 0;
        rows.put(w, r, j, x, k0);
    }
}

// in_place: products are added to O itself, not to zero.
template <bool in_place>
void long_tiles(Rows& rows, const Heads& heads, unsigned shared, int q1, int end, int first) {
    const int length = tile_length(bc, rows.shape.tk), count = (end + length - 1) / length;
    const int seen = rows.shape.last_key(q1 - 1) + 1;
    for (int step = 0; step < count; step++) {
        const int j = order_fa2 ? count - 1 - step : step, k0 = j * length, k1 = min(k0 + length, rows.shape.tk);
        const bool visits = k0 < rows.end;
        rows.at.tile = j;
        float m_new[R], alpha[R], sum[R];
        long_maximum(rows, heads, shared, k0, k1, seen, m_new);
        if constexpr (algorithm_plain) {
#pragma unroll
            for (int r = 0; r < R; r++) rows.m[r] = m_new[r];
            plain_row_sum(rows, heads, shared, seen);
        } else if (visits) {
#pragma unroll
            for (int r = 0; r < R; r++) {
                alpha[r] = rows.move(r, m_new[r]);
                sum[r] = order_fa2 ? rows.l[r] : 0.f;
            }
        }

        float pv[in_place ? 1 : M][in_place ? 1 : C][4];
        if constexpr (!in_place) {
#pragma unroll
            for (int i = 0; i < M; i++)
#pragma unroll
                for (int c = 0; c < C; c++)
#pragma unroll
                    for (int e = 0; e < 4; e++) pv[i][c][e] = 0;
        } else if (!algorithm_plain && visits) {
            rows.each_output(first, [&](float& o, int i, int c, int e, const At& here) {
                o = rows.start(o, alpha[2 * i + e / 2], here);
            });
        }
        for (int chunk = k0; chunk < k1; chunk += KEYS) {
            load_chunk<true>(rows, heads, shared, chunk, k1);
            if (!visits) continue;
            float s[M][N][4];
            Weights<product_pv, M, N> w;
            rows.multiply(s, shared);
            rows.scores(s, chunk, k1);
            if constexpr (algorithm_plain) {
#pragma unroll
                for (int r = 0; r < R; r++) plain_weigh(rows, w, s, r, chunk);
            } else {
                float scaled[R];
#pragma unroll
                for (int r = 0; r < R; r++) scaled[r] = chunk == k0 ? alpha[r] : 1.f;
                rows.weigh<false>(w, s, chunk, scaled, sum);
            }
            if constexpr (in_place) product_columns<product_pv, VTile>(rows.o, w, shared + KTile::bytes, 0);
            else product_columns<product_pv, VTile>(pv, w, shared + KTile::bytes, 0);
        }
        if (algorithm_plain || !visits) continue;
#pragma unroll
        for (int r = 0; r < R; r++) rows.add_row_sum(r, sum[r]);
        rows.each_output(first, [&](float& o, int i, int c, int e, const At& here) {
            o = rows.joined(o, alpha[2 * i + e / 2], in_place ? o : pv[in_place ? 0 : i][in_place ? 0 : c][e],
                            here);
        });
    }
}
