// Executes decoded PTX, one CTA at a time, one warp at a time, on the CPU, and watches memory.
//
// What it watches, by the byte group ("unit") of global and shared memory: who wrote it last and
// who read it since (CTA, barrier epoch, warp, lane, instruction), so that accesses by different
// warps of a CTA with no barrier between them, or by different CTAs of a launch, are reported as
// races; whether it was ever written; whether it belongs to the tensor; alignment. See ptx.py for
// the decoder.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

typedef uint32_t u32;
typedef int32_t i32;
typedef uint64_t u64;
typedef int64_t i64;
typedef uint16_t u16;
typedef uint8_t u8;

#define OPS(X) \
  X(MOV32) X(MOV64) X(MOVP) X(PACK64) X(UNPACK64) X(PACK32) X(UNPACK32) \
  X(ADD32) X(ADD64) X(SUB32) X(SUB64) X(MUL32) X(MUL64) X(MULHIS32) X(MULHIU32) X(MULWS32) \
      X(MULWU32) \
  X(MULHIU64) X(MAD32) X(MAD64) X(MADWS32) X(MADWU32) \
  X(DIVS32) X(DIVU32) X(REMS32) X(REMU32) X(DIVS64) X(DIVU64) X(REMS64) X(REMU64) \
  X(MINS32) X(MAXS32) X(MINU32) X(MAXU32) X(MINS64) X(MAXS64) X(MINU64) X(MAXU64) \
  X(AND32) X(OR32) X(XOR32) X(NOT32) X(AND64) X(OR64) X(XOR64) X(NOT64) X(ANDP) X(ORP) X(XORP) \
      X(NOTP) \
  X(SHL32) X(SHRU32) X(SHRS32) X(SHL64) X(SHRU64) X(SHRS64) X(SHL16) X(SHRU16) X(SHRS16) \
  X(AND16) X(OR16) X(XOR16) X(NOT16) X(ADD16) X(SUB16) X(MUL16) \
  X(NEG32) X(NEG64) X(ABS32) X(ABS64) X(BFEU32) X(BFES32) X(BFEU64) X(BFI32) X(PRMT) X(POPC32) X(CLZ32) \
  X(SEL32) X(SEL64) X(SETPS32) X(SETPU32) X(SETPS64) X(SETPU64) X(SETPS16) X(SETPU16) X(SETPF32) \
  X(FADD) X(FSUB) X(FMUL) X(FFMA) X(FNEG) X(FABS) X(FMIN) X(FMAX) X(FDIV) \
      X(FRCP) X(FEX2) X(FLG2) X(FSQRT) \
  X(FRSQRT) X(FTANH) X(FADD2) X(FMUL2) X(FFMA2) \
  X(CVTF32BF16) X(CVTF32F16) X(CVTBF16F32) X(CVTF16F32) X(CVTBF16X2) X(CVTF16X2) X(CVTTF32) \
  X(CVTS32F32) X(CVTU32F32) X(CVTF32S32) X(CVTF32U32) X(CVTF32S64) \
  X(CVTU64U32) X(CVTS64S32) X(CVTU32U64) X(CVTU32U16) X(CVTS32S16) X(CVTU16U32) X(CVTS32S8) \
      X(CVTU32U8) \
  X(CVTU64U16) X(CVTS64S16) \
  X(LD) X(ST) X(LDMATRIX) X(STMATRIX) X(BAR) X(WARPSYNC) X(SHFL) \
      X(REDUX) \
  X(MMATF32) X(MMABF16) X(MMABF16K8) X(MMAF16) X(MOVMATRIX) X(WGMMA) X(WGFENCE) X(WGCOMMIT) X(WGWAIT) X(FENCEPROXY) \
      X(BRA) X(RET) X(NOP)

enum Op {
#define X(n) n,
  OPS(X)
#undef X
      NUM_OPS
};
static const char *NAMES[] = {
#define X(n) #n,
    OPS(X)
#undef X
};

struct Ins {
  i32 op, guard, off, n, f0, f1, f2, line;
  i64 imm;
};

struct Region {  // of global memory: one storage
  u64 size;      // bytes
  u8 *data;
  u8 *flags;     // per byte: 1 initialised, 2 belongs to an argument
  i32 unit;      // bytes per shadow record
  i32 id;
};

struct Sh {  // shadow of one unit
  u64 w, r1, r2;
  u32 wpc, rpc1, rpc2;
  u32 rcta, rcta2;
  u32 flags;  // 1: an asynchronous write is pending; 2: a product that reads it is
};

struct Report {
  i32 kind, line, other, count;
  i32 cta, warp, lane, owarp;
  i32 olane, octa;
  u64 addr;
  i32 region, epoch;
};

#define KINDS(X) \
  X(OOB_GLOBAL) X(OUT_OF_VIEW) X(UNINIT_GLOBAL) X(MISALIGNED) X(OOB_SHARED) X(UNINIT_SHARED) \
  X(RACE_RAW_G) X(RACE_WAR_G) X(RACE_WAW_G) X(RACE_RAW_S) X(RACE_WAR_S) X(RACE_WAW_S) \
  X(SAMEVAL_WAW_G) X(SAMEVAL_WAW_S) X(CTA_RACE) X(CTA_SAMEVAL) X(LANE_RAW_G) X(LANE_WAR_G) \
  X(LANE_WAW_G) X(LANE_RAW_S) X(LANE_WAR_S) X(LANE_WAW_S) X(LANE_SAMEVAL) X(ASYNC_RACE) \
  X(NC_AFTER_WRITE) X(DIVERGENT) X(DEADLOCK) X(PROXY_FENCE) X(WGMMA_REGS) X(UNDEF_TF) \
  X(HARD_ERROR) X(INSTR_WAW)

enum Kind {
#define X(n) n,
  KINDS(X)
#undef X
      NUM_KINDS
};
static const char *KIND_NAMES[] = {
#define X(n) #n,
    KINDS(X)
#undef X
};

struct Initial {  // value of a register at the start of every warp
  i32 kind, slot;  // 0: of 32 bits, 1: of 64 bits, 2: special, with its number as the value
  u64 value;
};

struct Launch {
  i32 nins;
  Ins *ins;
  i32 *pool;
  i32 nr, nrd, np, ninit;
  Initial *init;
  i32 grid[3];
  i32 threads, shared, nregions;
  Region *regions;
  u64 seed;
  i32 slice;  // instructions before another warp may go on; 0: until the barrier
  i32 sunit;  // unit of shared memory
};

static const u64 BUDGET = 2000000000;  // instructions of a warp before it counts as hanging

static inline float f_of(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static inline u32 u_of(float f) { u32 x; memcpy(&x, &f, 4); return x; }

static float half_to_float(u16 h) { _Float16 x; memcpy(&x, &h, 2); return (float)x; }
static u16 float_to_half(float f) { _Float16 x = (_Float16)f; u16 h; memcpy(&h, &x, 2); return h; }
static u16 float_to_bf16(float f) {
  u32 x = u_of(f);
  if ((x & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (u16)((x + 0x7fff + ((x >> 16) & 1)) >> 16);
}
static inline float ftz(float x) { u32 u = u_of(x);
    return (u & 0x7f800000) == 0 ? f_of(u & 0x80000000) : x; }

struct Warp {
  std::vector<u32> r;   // [slot][32]
  std::vector<u64> rd;
  std::vector<u32> p;   // mask
  u32 live, active;
  i32 pc;
  bool diverged;
  i32 lanepc[32];
  int state;  // 0 ready, 1 at barrier, 2 done
  u32 epoch, sub;
  u64 steps;
  i32 id;
  u32 fences;
};

struct Wg {  // an asynchronous warp-group product in flight
  i32 group;              // warp group
  int stage;              // 0 not committed, 1 committed
  u32 epoch[4];           // at issue
  std::vector<std::pair<u32, u32>> smem;  // ranges read
  std::vector<std::vector<i32>> dregs;    // slots
  i32 line;
};

struct Machine {
  const Launch *L;
  std::vector<Warp> warps;
  std::vector<u8> smem, sinit;
  std::vector<Sh> ssh;
  // generic writes of each shared unit not yet made visible to the async proxy
  std::vector<u32> sfence;
  std::vector<std::vector<Sh *>> gsh;  // pages
  std::map<std::pair<int, std::pair<int, int>>, Report> reports;
  i32 cta = 0;
  u32 epoch = 0;
  std::string error;
  u64 executed = 0;
  // wgmma: what every warp of a group has brought to the product, executed when all four have.
  struct WgPending { u32 mask = 0; i32 pc = -1; };
  WgPending wgpend[8];
  std::vector<Wg> wgs[8];
  u32 waited[8] = {0};
  static const u32 SBASE = 1024;
  static const int PAGE = 4096;

  ~Machine() {
    for (auto &v : gsh) for (Sh *s : v) free(s);
  }

  void report(int kind, int line, int other, u64 addr, int warp, int lane, u64 otag, int region) {
    auto key = std::make_pair(kind, std::make_pair(line, other));
    auto it = reports.find(key);
    if (it != reports.end()) { it->second.count++; return; }
    if (reports.size() > 4000) return;
    Report r;
    r.kind = kind; r.line = line; r.other = other; r.count = 1;
    r.cta = cta; r.warp = warp; r.lane = lane;
    r.owarp = otag ? (int)((otag >> 5) & 63) : -1; r.olane = otag ? (int)(otag & 31) : -1;
    r.octa = otag ? (int)(otag >> 40) - 1 : -1;
    r.addr = addr; r.region = region; r.epoch = epoch;
    reports[key] = r;
  }

  // tag: cta + 1 (24) | epoch (29 - via two parts) | sub | warp | lane
  // 40..63 cta+1, 11..39 epoch(17)+sub(12), 5..10 warp, 0..4 lane
  static u64 tag(u32 cta, u32 epoch, u32 sub, u32 warp, u32 lane) {
    return ((u64)(cta + 1) << 40) | ((u64)(epoch & 0x3ffff) << 22) | ((u64)(sub & 0x7ff) << 11)
        | ((u64)(warp & 63) << 5) | lane;
  }
  static u32 t_cta(u64 t) { return (u32)(t >> 40); }
  static u32 t_epoch(u64 t) { return (u32)(t >> 22) & 0x3ffff; }
  static u32 t_sub(u64 t) { return (u32)(t >> 11) & 0x7ff; }
  static u32 t_warp(u64 t) { return (u32)(t >> 5) & 63; }
  static u32 t_lane(u64 t) { return (u32)t & 31; }

  void on_read(Sh &s, u64 t, int line, bool shared, u64 addr, int region, bool nc) {
    if (s.w) {
      if (t_cta(s.w) != t_cta(t)) {
        report(CTA_RACE, line, s.wpc, addr, t_warp(t), t_lane(t), s.w, region);
      } else if (t_warp(s.w) != t_warp(t)) {
        if (t_epoch(s.w) == t_epoch(t))
          report(shared ? RACE_RAW_S : RACE_RAW_G, line, s.wpc, addr, t_warp(t), t_lane(t), s.w,
              region);
      } else if (t_lane(s.w) != t_lane(t) && t_epoch(s.w) == t_epoch(t) && t_sub(s.w) == t_sub(t)) {
        report(shared ? LANE_RAW_S : LANE_RAW_G, line, s.wpc, addr, t_warp(t), t_lane(t), s.w,
            region);
      }
      if (nc) report(NC_AFTER_WRITE, line, s.wpc, addr, t_warp(t), t_lane(t), s.w, region);
    }
    if (s.r1 && (t_warp(s.r1) != t_warp(t) || t_cta(s.r1) != t_cta(t))) { s.r2 = s.r1;
        s.rpc2 = s.rpc1; }
    s.r1 = t; s.rpc1 = line;
    if (s.rcta && s.rcta != t_cta(t)) s.rcta2 = s.rcta;
    s.rcta = t_cta(t);
  }

  void on_write(Sh &s, u64 t, int line, bool shared, u64 addr, int region, bool same) {
    if (s.flags & 2) report(ASYNC_RACE, line, s.rpc1, addr, t_warp(t), t_lane(t), s.r1, region);
    if (s.w) {
      if (t_cta(s.w) != t_cta(t)) {
        report(same ? CTA_SAMEVAL : CTA_RACE, line, s.wpc, addr, t_warp(t), t_lane(t), s.w, region);
      } else if (t_warp(s.w) != t_warp(t)) {
        if (t_epoch(s.w) == t_epoch(t))
          report(same ? (shared ? SAMEVAL_WAW_S : SAMEVAL_WAW_G) : (shared ? RACE_WAW_S
              : RACE_WAW_G), line, s.wpc, addr,
                 t_warp(t), t_lane(t), s.w, region);
      } else if (t_lane(s.w) != t_lane(t) && t_epoch(s.w) == t_epoch(t) && t_sub(s.w) == t_sub(t)) {
        report(same ? LANE_SAMEVAL : (shared ? LANE_WAW_S : LANE_WAW_G), line, s.wpc, addr,
            t_warp(t), t_lane(t), s.w, region);
      }
    }
    u64 rs[2] = {s.r1, s.r2};
    u32 rp[2] = {s.rpc1, s.rpc2};
    for (int i = 0; i < 2; i++) {
      u64 r = rs[i];
      if (!r || t_cta(r) != t_cta(t) || t_epoch(r) != t_epoch(t)) continue;
      if (t_warp(r) != t_warp(t))
        report(shared ? RACE_WAR_S : RACE_WAR_G, line, rp[i], addr, t_warp(t), t_lane(t), r,
            region);
      else if (t_lane(r) != t_lane(t) && t_sub(r) == t_sub(t))
        report(shared ? LANE_WAR_S : LANE_WAR_G, line, rp[i], addr, t_warp(t), t_lane(t), r,
            region);
    }
    if ((s.rcta && s.rcta != t_cta(t)) || (s.rcta2 && s.rcta2 != t_cta(t)))
      report(CTA_RACE, line, s.rpc1, addr, t_warp(t), t_lane(t), s.r1, region);
    s.w = t; s.wpc = line;
    s.r1 = s.r2 = 0;
    // readers of other CTAs are kept in rcta
  }

  Sh &gshadow(int reg, u64 unit) {
    auto &v = gsh[reg];
    u64 page = unit / PAGE;
    if (!v[page]) v[page] = (Sh *)calloc(PAGE, sizeof(Sh));
    return v[page][unit % PAGE];
  }

  // Return host pointer or null after reporting.
  u8 *global(u64 a, u32 bytes, int line, int warp, int lane, int &reg, u64 &off) {
    if (a % bytes) { report(MISALIGNED, line, 0, a, warp, lane, 0, -1); return nullptr; }
    i64 idx = (i64)(a >> 40) - 1;
    if (idx < 0 || idx >= L->nregions) { report(OOB_GLOBAL, line, 0, a, warp, lane, 0, -1);
        return nullptr; }
    i64 o = (i64)(a & ((1ULL << 40) - 1)) - (1LL << 39);
    Region &R = L->regions[idx];
    if (o < 0 || (u64)o + bytes > R.size) {
        report(OOB_GLOBAL, line, 0, (u64)o, warp, lane, 0, R.id); return nullptr; }
    reg = (int)idx; off = (u64)o;
    for (u32 i = 0; i < bytes; i++)
      if (!(R.flags[off + i] & 2)) { report(OUT_OF_VIEW, line, 0, off, warp, lane, 0, R.id);
          break; }
    return R.data + off;
  }

  bool gread(u64 a, u32 bytes, void *out, Warp &W, int lane, int line, bool nc, bool track = true) {
    int reg; u64 off;
    u8 *h = global(a, bytes, line, W.id, lane, reg, off);
    if (!h) { memset(out, 0xff, bytes); return false; }
    memcpy(out, h, bytes);
    Region &R = L->regions[reg];
    for (u32 i = 0; i < bytes; i++)
      if (!(R.flags[off + i] & 1)) { report(UNINIT_GLOBAL, line, 0, off, W.id, lane, 0, R.id);
          break; }
    u64 t = tag(cta, epoch, W.sub, W.id, lane);
    for (u64 u = off / R.unit; u <= (off + bytes - 1) / R.unit; u++)
        on_read(gshadow(reg, u), t, line, false, off, R.id, nc);
    return true;
  }

  void gwrite(u64 a, u32 bytes, const void *in, Warp &W, int lane, int line) {
    int reg; u64 off;
    u8 *h = global(a, bytes, line, W.id, lane, reg, off);
    if (!h) return;
    Region &R = L->regions[reg];
    u64 t = tag(cta, epoch, W.sub, W.id, lane);
    for (u64 u = off / R.unit; u <= (off + bytes - 1) / R.unit; u++) {
      u64 b = u * R.unit, e = std::min(b + R.unit, off + bytes);
      b = std::max(b, off);
      bool same = memcmp(h + (b - off), (const u8 *)in + (b - off), e - b) == 0;
      on_write(gshadow(reg, u), t, line, false, off, R.id, same);
    }
    memcpy(h, in, bytes);
    for (u32 i = 0; i < bytes; i++) R.flags[off + i] |= 1;
  }

  bool scheck(u32 a, u32 bytes, u32 align, Warp &W, int lane, int line, u32 &off) {
    if (a % align) { report(MISALIGNED, line, 0, a, W.id, lane, 0, -2); return false; }
    if (a < SBASE || (u64)a + bytes > (u64)SBASE + L->shared) {
        report(OOB_SHARED, line, 0, a, W.id, lane, 0, -2); return false; }
    off = a - SBASE;
    return true;
  }

  bool sread(u32 a, u32 bytes, void *out, Warp &W, int lane, int line) {
    u32 off;
    if (!scheck(a, bytes, bytes, W, lane, line, off)) { memset(out, 0xff, bytes); return false; }
    memcpy(out, &smem[off], bytes);
    for (u32 i = 0; i < bytes; i++) if (!sinit[off + i]) {
        report(UNINIT_SHARED, line, 0, off, W.id, lane, 0, -2); break; }
    u64 t = tag(cta, epoch, W.sub, W.id, lane);
    for (u32 u = off / L->sunit; u <= (off + bytes - 1) / L->sunit; u++)
        on_read(ssh[u], t, line, true, off, -2, false);
    return true;
  }

  void swrite(u32 a, u32 bytes, const void *in, Warp &W, int lane, int line) {
    u32 off;
    if (!scheck(a, bytes, bytes, W, lane, line, off)) return;
    u64 t = tag(cta, epoch, W.sub, W.id, lane);
    for (u32 u = off / L->sunit; u <= (off + bytes - 1) / L->sunit; u++) {
      u32 b = std::max(u * L->sunit, off), e = std::min((u + 1) * L->sunit, off + bytes);
      bool same = sinit[b] && memcmp(&smem[b], (const u8 *)in + (b - off), e - b) == 0;
      on_write(ssh[u], t, line, true, off, -2, same);
      sfence[u] = (W.id << 24) | ((W.fences + 1) & 0xffffff);
    }
    memcpy(&smem[off], in, bytes);
    memset(&sinit[off], 1, bytes);
  }

  void fail(const Ins &I, const Warp &W, const std::string &what) {
    if (error.empty()) {
      char b[300];
      snprintf(b, sizeof b, "PTX line %d (%s), cta %d warp %d: %s", I.line, NAMES[I.op], cta, W.id,
          what.c_str());
      error = b;
    }
  }

  // Tensor cores cut operands to TF32.
  static float tf32(u32 x) { return f_of(x & 0xffffe000u); }

  // Sum of products as tensor cores do it: addends aligned to the largest exponent, low bits cut
  // off.
  float tcsum(const double *prod, int n, float c) {
    float acc = c;
    for (int k = 0; k < n; k += 4) {
      int m = std::min(4, n - k), emax = -1000;
      bool special = !std::isfinite(acc);
      double ex = acc;
      for (int i = 0; i < m; i++) { ex += prod[k + i];
          if (!std::isfinite(prod[k + i])) special = true; }
      if (special) { acc = (float)ex; continue; }
      if (acc != 0) emax = std::max(emax, std::ilogb((double)acc));
      for (int i = 0; i < m; i++) if (prod[k + i] != 0) emax =
          std::max(emax, std::ilogb(prod[k + i]));
      if (emax == -1000) { continue; }
      double ulp = std::ldexp(1.0, emax - 24);  // 23 bits and one more
      double s = std::trunc(acc / ulp);
      for (int i = 0; i < m; i++) s += std::trunc(prod[k + i] / ulp);
      s *= ulp;
      // round toward zero to float
      float f = (float)s;
      if (std::fabs((double)f) > std::fabs(s)) f = std::nextafterf(f, 0.0f);
      acc = f;
    }
    return acc;
  }

  void start(Warp &W, int id);
  void step(Warp &W, u64 limit);
  void branch(Warp &W, u32 mask, i32 target);
  bool run_cta(u64 seed);
  void wgmma(const Ins &I, int group);
};

void Machine::start(Warp &W, int id) {
  W.id = id;
  W.r.assign((size_t)L->nr * 32, 0x7fbadbadu);
  W.rd.assign((size_t)L->nrd * 32, 0x7fbadbad7fbadbadULL);
  W.p.assign(L->np, 0);
  int base = id * 32, n = std::min(32, L->threads - base);
  W.live = n == 32 ? ~0u : ((1u << n) - 1);
  W.active = W.live; W.pc = 0; W.diverged = false; W.state = 0; W.epoch = 0; W.sub = 0;
      W.steps = 0; W.fences = 0;
  u32 gx = L->grid[0], gy = L->grid[1];
  u32 sp[] = {0, (u32)cta % gx, (u32)cta / gx % gy, (u32)cta / gx / gy, gx, gy, (u32)L->grid[2], 0,
      (u32)L->threads, 0, 0, 1, 1};
  for (int i = 0; i < L->ninit; i++) {
    const Initial &I = L->init[i];
    if (I.kind == 1) std::fill_n(&W.rd[I.slot * 32], 32, I.value);
    else if (I.kind == 0) std::fill_n(&W.r[I.slot * 32], 32, (u32)I.value);
    else for (int l = 0; l < 32; l++)
      W.r[I.slot * 32 + l] = I.value == 0 ? base + l : I.value == 7 ? l : sp[I.value];
  }
}

void Machine::branch(Warp &W, u32 taken, i32 target) {
  // all active lanes are at W.pc
  u32 rest = W.active & ~taken;
  if (!W.diverged) {
    if (!rest) { W.pc = target; return; }
    if (!taken) { W.pc++; return; }
    for (int l = 0; l < 32; l++) W.lanepc[l] = W.pc;
    W.diverged = true;
  }
  for (int l = 0; l < 32; l++) {
    if (taken >> l & 1) W.lanepc[l] = target;
    else if (rest >> l & 1) W.lanepc[l] = W.pc + 1;
  }
  i32 m = INT32_MAX;
  for (int l = 0; l < 32; l++) if (W.live >> l & 1) m = std::min(m, W.lanepc[l]);
  u32 a = 0;
  for (int l = 0; l < 32; l++) if ((W.live >> l & 1) && W.lanepc[l] == m) a |= 1u << l;
  W.active = a; W.pc = m;
  if (a == W.live) W.diverged = false;
}

#define LANES(body) \
  if (mask == ~0u) { for (int l = 0; l < 32; l++) { body; } } \
  else { for (int l = 0; l < 32; l++) if (mask >> l & 1) { body; } }
#define R(i) (&W.r[(size_t)pool[I.off + (i)] * 32])
#define D(i) (&W.rd[(size_t)pool[I.off + (i)] * 32])
#define PR(i) (W.p[pool[I.off + (i)]])
#define B32(expr) { u32 *d = R(0), *a = R(1), *b = R(2); (void)b; LANES(d[l] = (u32)(expr)) break; }
#define U32_(expr) { u32 *d = R(0), *a = R(1); LANES(d[l] = (u32)(expr)) break; }
#define B64(expr) { u64 *d = D(0), *a = D(1), *b = D(2); LANES(d[l] = (u64)(expr)) break; }
#define U64_(expr) { u64 *d = D(0), *a = D(1); LANES(d[l] = (u64)(expr)) break; }
#define T32(expr) { u32 *d = R(0), *a = R(1), *b = R(2), *c = R(3); \
    LANES(d[l] = (u32)(expr)) break; }
#define FB(expr) { u32 *d = R(0), *a_ = R(1), *b_ = R(2); LANES(float a = f_of(a_[l]); \
    float b = f_of(b_[l]); d[l] = u_of(expr)) break; }
#define FU(expr) { u32 *d = R(0), *a_ = R(1); LANES(float a = f_of(a_[l]); \
    d[l] = u_of(expr)) break; }

template <class T> static inline bool cmp(int c, T a, T b) {
  switch (c) { case 0: return a == b; case 1: return a != b; case 2: return a < b;
      case 3: return a <= b; case 4: return a > b; default: return a >= b; }
}
static inline bool cmpf(int c, float a, float b) {
  bool un = std::isnan(a) || std::isnan(b);
  if (c < 6) { if (un) return false; return cmp(c, a, b); }
  if (c == 12) return !un;   // num
  if (c == 13) return un;    // nan
  if (un) return true;
  return cmp(c - 6, a, b);
}
// operands: p, a, b; f0 the comparison
#define SETP(T, ptr, compare) { u32 res = 0; auto *a = ptr(1), *b = ptr(2); \
    LANES(res |= (u32)compare(I.f0, T(a[l]), T(b[l])) << l) \
    PR(0) = (PR(0) & ~mask) | (res & mask); break; }

static const int RUN = 0, BARRIER = 1, DONE = 2;

// wgmma.mma_async m64nNk8 tf32 or k16 bf16 or f16. operands: d[N/2] (both d and c), then a[4] regs or a desc
// (64), b desc (64), scale-d pred index. f0 = N, f1 bits: 0 A in shared memory, 1 and 2 A and B negated,
// 3 and 4 the type; scale-d as a constant or a pred idx in imm
void Machine::wgmma(const Ins &I, int group) {
  const i32 *pool = L->pool;
  int N = I.f0, nd = N / 2, at = I.off + nd;
  bool ashared = I.f1 & 1, neg_a = I.f1 & 2, neg_b = I.f1 & 4;
  int kind = I.f1 >> 3, K = kind ? 16 : 8;
  // Number k of a row, given the four bytes that it is in.
  auto number = [&](u32 word, int k) -> double {
    if (!kind) return tf32(word);
    u16 half = (u16)(word >> (16 * (k & 1)));
    return kind == 1 ? f_of((u32)half << 16) : half_to_float(half);
  };
  auto kword = [&](int k) -> int { return kind ? k / 2 * 4 : k * 4; };
  Warp &W0 = warps[group * 4];
  i32 bdesc = pool[at + (ashared ? 1 : 4)];
  i32 pscale = pool[at + (ashared ? 2 : 5)];
  auto address = [&](u64 desc, int row, int kbyte) -> u32 {
    // K-major operand, `row` along M or N, kbyte along K (32 bytes a step)
    u32 start = (u32)(desc & 0x3fff) << 4, lead = (u32)(desc >> 16 & 0x3fff) << 4,
        stride = (u32)(desc >> 32 & 0x3fff) << 4;
    u32 swz = (u32)(desc >> 62);
    u32 a;
    if (swz == 0) {  // core matrices 8 rows x 16 bytes, contiguous 128 bytes
      a = start + (row / 8) * stride + (kbyte / 16) * lead + (row % 8) * 16 + kbyte % 16;
      return a;
    }
    u32 width = swz == 1 ? 128 : swz == 2 ? 64 : 32;
    a = start + (row / 8) * stride + (row % 8) * width + kbyte;
    // the swizzle is of address bits: 16-byte chunk index ^= row of 128-byte lines
    u32 bits = width == 128 ? 7 : width == 64 ? 3 : 1;
    a ^= ((a >> 7) & bits) << 4;
    return a;
  };
  Wg g; g.group = group; g.stage = 0; g.line = I.line;
  for (int w = 0; w < 4; w++) g.epoch[w] = epoch;
  auto sread4 = [&](u32 a, int w) -> u32 {
    u32 off;
    if (!scheck(a, 4, 4, warps[group * 4 + w], 0, I.line, off)) return 0xffffffffu;
    u32 v; memcpy(&v, &smem[off], 4);
    for (int i = 0; i < 4; i++) if (!sinit[off + i]) {
        report(UNINIT_SHARED, I.line, 0, off, group * 4 + w, 0, 0, -2); break; }
    u64 t = tag(cta, epoch, warps[group * 4 + w].sub, group * 4 + w, 0);
    u32 un = off / L->sunit;
    // a product reads for the warp group: written by any warp in this epoch is a race, except by
    // none
    Sh &s = ssh[un];
    if (s.w && t_cta(s.w) == t_cta(t) && t_epoch(s.w) == t_epoch(t))
      report(RACE_RAW_S, I.line, s.wpc, off, group * 4 + w, 0, s.w, -2);
    if (s.r1 && t_warp(s.r1) != t_warp(t)) { s.r2 = s.r1; s.rpc2 = s.rpc1; }
    s.r1 = t; s.rpc1 = I.line; s.flags |= 2;
    if (s.w && sfence[un]) {
      u32 fw = sfence[un] >> 24, need = sfence[un] & 0xffffff;
      // fenced by the writer after its write, or by the reader after the barrier
      if (warps[fw].fences < need) report(PROXY_FENCE, I.line, s.wpc, off, group * 4 + w, 0, s.w,
          -2);
    }
    g.smem.push_back({off, 4});
    return v;
  };
  // B[k][n]: K-major: row = n
  u64 bd = W0.rd[(size_t)bdesc * 32];
  for (int w = 0; w < 4; w++)
    for (int l = 0; l < 32; l++)
      if (warps[group * 4 + w].rd[(size_t)bdesc * 32 + l] != bd) {
          fail(I, W0, "descriptor differs between lanes"); return; }
  std::vector<double> B(K * N);
  for (int n = 0; n < N; n++)
    for (int k = 0; k < K; k++) B[k * N
        + n] = number(sread4(address(bd, n, kword(k)), 0), k) * (neg_b ? -1 : 1);
  for (int w = 0; w < 4; w++) {
    Warp &W = warps[group * 4 + w];
    double A[16][16];
    if (ashared) {
      u64 ad = W0.rd[(size_t)pool[at] * 32];
      for (int r = 0; r < 16; r++) for (int k = 0; k < K; k++) A[r][k] =
          number(sread4(address(ad, w * 16 + r, kword(k)), w), k);
    } else if (kind) {
      for (int l = 0; l < 32; l++) for (int h = 0; h < 2; h++) for (int q = 0; q < 4; q++)
        A[(l >> 2) + 8 * (q & 1)][2 * (l & 3) + 8 * (q >> 1) + h] =
            number(W.r[(size_t)pool[at + q] * 32 + l], h);
    } else {
      for (int l = 0; l < 32; l++) {
        int gq = l >> 2, t = l & 3;
        A[gq][t] = tf32(W.r[(size_t)pool[at] * 32 + l]);
        A[gq + 8][t] = tf32(W.r[(size_t)pool[at + 1] * 32 + l]);
        A[gq][t + 4] = tf32(W.r[(size_t)pool[at + 2] * 32 + l]);
        A[gq + 8][t + 4] = tf32(W.r[(size_t)pool[at + 3] * 32 + l]);
      }
    }
    if (neg_a) for (auto &r : A) for (double &x : r) x = -x;
    bool scale = I.imm != 0;
    if (pscale >= 0) scale = W.p[pscale] & 1;
    for (int l = 0; l < 32; l++) {
      int gq = l >> 2, t = l & 3;
      for (int j = 0; j < nd; j++) {
        int col = (j / 4) * 8 + 2 * t + (j & 1), row = gq + ((j >> 1) & 1) * 8;
        u32 *d = &W.r[(size_t)pool[I.off + j] * 32];
        double prod[16];
        for (int k = 0; k < K; k++) prod[k] = A[row][k] * B[k * N + col];
        d[l] = u_of(tcsum(prod, K, scale ? f_of(d[l]) : 0.0f));
      }
    }
  }
  std::vector<i32> regs(pool + I.off, pool + I.off + nd);
  g.dregs.push_back(regs);
  wgs[group].push_back(g);
}

void Machine::step(Warp &W, u64 limit) {
  const i32 *pool = L->pool;
  const Ins *ins = L->ins;
  for (u64 n = 0; n < limit; n++) {
    if (W.pc >= L->nins) { W.state = DONE; return; }
    const Ins &I = ins[W.pc];
    u32 mask = W.active;
    if (I.guard >= 0) { u32 p = W.p[I.guard >> 1]; mask &= (I.guard & 1) ? ~p : p; }
    executed++;
    if (++W.steps > BUDGET) { report(DEADLOCK, I.line, 0, 0, W.id, 0, 0, -1);
        fail(I, W, "instruction budget spent: hang?"); return; }
    if (I.op == BRA) { branch(W, mask, (i32)I.imm); continue; }
    if (mask == 0) {
      if (I.op == RET || I.op == BAR || I.op == WGMMA) {}
      goto next;
    }
    switch (I.op) {
      case NOP: break;
      case MOV32: U32_(a[l])
      case MOV64: U64_(a[l])
      case MOVP: PR(0) = (PR(0) & ~mask) | (PR(1) & mask); break;
      case PACK64: { u64 *d = D(0); u32 *a = R(1), *b = R(2);
          LANES(d[l] = (u64)a[l] | (u64)b[l] << 32) break; }
      case UNPACK64: { u64 *s = D(2); u32 *a = R(0), *b = R(1); LANES(u64 v = s[l]; a[l] = (u32)v;
          b[l] = (u32)(v >> 32)) break; }
      case PACK32: { u32 *d = R(0), *a = R(1), *b = R(2);
          LANES(d[l] = (a[l] & 0xffff) | b[l] << 16) break; }
      case UNPACK32: { u32 *s = R(2), *a = R(0), *b = R(1); LANES(u32 v = s[l]; a[l] = v & 0xffff;
          b[l] = v >> 16) break; }
      case ADD32: B32(a[l] + b[l])
      case ADD64: B64(a[l] + b[l])
      case SUB32: B32(a[l] - b[l])
      case SUB64: B64(a[l] - b[l])
      case MUL32: B32(a[l] * b[l])
      case MUL64: B64(a[l] * b[l])
      case MULHIS32: B32((u64)((i64)(i32)a[l] * (i64)(i32)b[l]) >> 32)
      case MULHIU32: B32(((u64)a[l] * b[l]) >> 32)
      case MULHIU64: B64(((unsigned __int128)a[l] * b[l]) >> 64)
      case MULWS32: { u64 *d = D(0); u32 *a = R(1), *b = R(2);
          LANES(d[l] = (u64)((i64)(i32)a[l] * (i64)(i32)b[l])) break; }
      case MULWU32: { u64 *d = D(0); u32 *a = R(1), *b = R(2);
          LANES(d[l] = (u64)a[l] * b[l]) break; }
      case MAD32: T32(a[l] * b[l] + c[l])
      case MAD64: { u64 *d = D(0), *a = D(1), *b = D(2), *c = D(3);
          LANES(d[l] = a[l] * b[l] + c[l]) break; }
      case MADWS32: { u64 *d = D(0), *c = D(3); u32 *a = R(1), *b = R(2);
          LANES(d[l] = (u64)((i64)(i32)a[l] * (i64)(i32)b[l]) + c[l]) break; }
      case MADWU32: { u64 *d = D(0), *c = D(3); u32 *a = R(1), *b = R(2);
          LANES(d[l] = (u64)a[l] * b[l] + c[l]) break; }
      // division by zero gives all ones on NVIDIA hardware
      case DIVS32: B32(b[l] == 0 ? ~0u : (b[l] == ~0u ? 0u - a[l] : (u32)((i32)a[l] / (i32)b[l])))
      case DIVU32: B32(b[l] == 0 ? ~0u : a[l] / b[l])
      case REMS32: B32(b[l] == 0 ? a[l] : (b[l] == ~0u ? 0u : (u32)((i32)a[l] % (i32)b[l])))
      case REMU32: B32(b[l] == 0 ? a[l] : a[l] % b[l])
      case DIVS64: B64(b[l] == 0 ? ~0ULL : (b[l] == ~0ULL ? 0ULL - a[l]
          : (u64)((i64)a[l] / (i64)b[l])))
      case DIVU64: B64(b[l] == 0 ? ~0ULL : a[l] / b[l])
      case REMS64: B64(b[l] == 0 ? a[l] : (b[l] == ~0ULL ? 0ULL : (u64)((i64)a[l] % (i64)b[l])))
      case REMU64: B64(b[l] == 0 ? a[l] : a[l] % b[l])
      case MINS32: B32(std::min((i32)a[l], (i32)b[l]))
      case MAXS32: B32(std::max((i32)a[l], (i32)b[l]))
      case MINU32: B32(std::min(a[l], b[l]))
      case MAXU32: B32(std::max(a[l], b[l]))
      case MINS64: B64(std::min((i64)a[l], (i64)b[l]))
      case MAXS64: B64(std::max((i64)a[l], (i64)b[l]))
      case MINU64: B64(std::min(a[l], b[l]))
      case MAXU64: B64(std::max(a[l], b[l]))
      case AND32: B32(a[l] & b[l])
      case OR32: B32(a[l] | b[l])
      case XOR32: B32(a[l] ^ b[l])
      case NOT32: U32_(~a[l])
      case AND64: B64(a[l] & b[l])
      case OR64: B64(a[l] | b[l])
      case XOR64: B64(a[l] ^ b[l])
      case NOT64: U64_(~a[l])
      case AND16: B32(a[l] & b[l] & 0xffff)
      case OR16: B32((a[l] | b[l]) & 0xffff)
      case XOR16: B32((a[l] ^ b[l]) & 0xffff)
      case NOT16: U32_(~a[l] & 0xffff)
      case ADD16: B32((a[l] + b[l]) & 0xffff)
      case SUB16: B32((a[l] - b[l]) & 0xffff)
      case MUL16: B32((a[l] * b[l]) & 0xffff)
      case ANDP: PR(0) = (PR(0) & ~mask) | (PR(1) & PR(2) & mask); break;
      case ORP: PR(0) = (PR(0) & ~mask) | ((PR(1) | PR(2)) & mask); break;
      case XORP: PR(0) = (PR(0) & ~mask) | ((PR(1) ^ PR(2)) & mask); break;
      case NOTP: PR(0) = (PR(0) & ~mask) | (~PR(1) & mask); break;
      case SHL32: B32(b[l] > 31 ? 0 : a[l] << b[l])
      case SHRU32: B32(b[l] > 31 ? 0 : a[l] >> b[l])
      case SHRS32: B32((i32)a[l] >> std::min(b[l], 31u))
      case SHL64: { u64 *d = D(0), *a = D(1); u32 *b = R(2);
          LANES(d[l] = b[l] > 63 ? 0 : a[l] << b[l]) break; }
      case SHRU64: { u64 *d = D(0), *a = D(1); u32 *b = R(2);
          LANES(d[l] = b[l] > 63 ? 0 : a[l] >> b[l]) break; }
      case SHRS64: { u64 *d = D(0), *a = D(1); u32 *b = R(2);
          LANES(d[l] = (u64)((i64)a[l] >> std::min(b[l], 63u))) break; }
      case SHL16: B32(b[l] > 15 ? 0 : (a[l] << b[l]) & 0xffff)
      case SHRU16: B32(b[l] > 15 ? 0 : (a[l] & 0xffff) >> b[l])
      case SHRS16: B32(((i32)(int16_t)a[l] >> std::min(b[l], 15u)) & 0xffff)
      case NEG32: U32_(0u - a[l])
      case NEG64: U64_(0ULL - a[l])
      case ABS32: U32_((i32)a[l] < 0 ? 0u - a[l] : a[l])
      case ABS64: U64_((i64)a[l] < 0 ? 0ULL - a[l] : a[l])
      case BFEU32: { u32 *d = R(0), *a = R(1), *b = R(2), *c = R(3);
        LANES(u32 pos = b[l] & 255; u32 len = c[l] & 255; u64 v = pos > 31 ? 0 : (u64)a[l] >> pos;
            d[l] = (u32)(len > 31 ? v : v & ((1ULL << len) - 1))) break; }
      case BFES32: { u32 *d = R(0), *a = R(1), *b = R(2), *c = R(3);
        LANES(u32 pos = b[l] & 255; u32 len = c[l] & 255;
              i64 v = (i64)(i32)a[l] >> std::min(pos, 63u);
              if (len == 0) v = 0; else if (pos + len < 32) { v = v << (64 - len) >> (64 - len); }
              d[l] = (u32)v) break; }
      case BFEU64: { u64 *d = D(0), *a = D(1); u32 *b = R(2), *c = R(3);
        LANES(u32 pos = b[l] & 255; u32 len = c[l] & 255; u64 v = pos > 63 ? 0 : a[l] >> pos;
            d[l] = len > 63 ? v : v & ((1ULL << len) - 1)) break; }
      case BFI32: { u32 *d = R(0), *a = R(1), *b = R(2), *c = R(3), *e = R(4);
        LANES(u32 pos = c[l] & 255; u32 len = e[l] & 255;
            u64 m = pos > 31 ? 0 : ((len > 31 ? 0xffffffffULL : ((1ULL << len) - 1)) << pos);
              d[l] = (u32)((b[l] & ~m) | (((u64)a[l] << pos) & m))) break; }
      case PRMT: { u32 *d = R(0), *a = R(1), *b = R(2), *c = R(3);
        LANES(u64 v = (u64)a[l] | (u64)b[l] << 32; u32 o = 0;
              for (int i = 0; i < 4; i++) { u32 s = c[l] >> (4 * i) & 15;
                  u32 x = (u32)(v >> (8 * (s & 7))) & 255; if (s & 8) x = x & 128 ? 255 : 0;
                  o |= x << (8 * i); }
              d[l] = o) break; }
      case POPC32: U32_(__builtin_popcount(a[l]))
      case CLZ32: U32_(a[l] ? __builtin_clz(a[l]) : 32)
      case SEL32: { u32 *d = R(0), *a = R(1), *b = R(2), p = PR(3);
          LANES(d[l] = p >> l & 1 ? a[l] : b[l]) break; }
      case SEL64: { u64 *d = D(0), *a = D(1), *b = D(2); u32 p = PR(3);
          LANES(d[l] = p >> l & 1 ? a[l] : b[l]) break; }
      case SETPS32: SETP(i32, R, cmp)
      case SETPU32: SETP(u32, R, cmp)
      case SETPS64: SETP(i64, D, cmp)
      case SETPU64: SETP(u64, D, cmp)
      case SETPS16: SETP(int16_t, R, cmp)
      case SETPU16: SETP(u16, R, cmp)
      case SETPF32: SETP(f_of, R, cmpf)
      case FADD: if (I.f0 & 1) FB(ftz(ftz(a) + ftz(b))) else FB(a + b)
      case FSUB: if (I.f0 & 1) FB(ftz(ftz(a) - ftz(b))) else FB(a - b)
      case FMUL: if (I.f0 & 1) FB(ftz(ftz(a) * ftz(b))) else FB(a * b)
      case FFMA: { u32 *d = R(0), *a = R(1), *b = R(2), *c = R(3);
        if (I.f0 & 1) LANES(d[l] = u_of(ftz(std::fma(ftz(f_of(a[l])), ftz(f_of(b[l])),
            ftz(f_of(c[l]))))))
        else LANES(d[l] = u_of(std::fma(f_of(a[l]), f_of(b[l]), f_of(c[l]))))
        break; }
      case FADD2: { u64 *d = D(0), *a = D(1), *b = D(2);
          LANES(float x = f_of((u32)a[l]) + f_of((u32)b[l]);
          float y = f_of((u32)(a[l] >> 32)) + f_of((u32)(b[l] >> 32));
          d[l] = (u64)u_of(x) | (u64)u_of(y) << 32) break; }
      case FMUL2: { u64 *d = D(0), *a = D(1), *b = D(2);
          LANES(float x = f_of((u32)a[l]) * f_of((u32)b[l]);
          float y = f_of((u32)(a[l] >> 32)) * f_of((u32)(b[l] >> 32));
          d[l] = (u64)u_of(x) | (u64)u_of(y) << 32) break; }
      case FFMA2: { u64 *d = D(0), *a = D(1), *b = D(2), *c = D(3);
          LANES(float x = std::fma(f_of((u32)a[l]), f_of((u32)b[l]), f_of((u32)c[l]));
          float y = std::fma(f_of((u32)(a[l] >> 32)), f_of((u32)(b[l] >> 32)),
          f_of((u32)(c[l] >> 32))); d[l] = (u64)u_of(x) | (u64)u_of(y) << 32) break; }
      case FNEG: U32_(a[l] ^ 0x80000000u)
      case FABS: U32_(a[l] & 0x7fffffffu)
      case FMIN: if (I.f0 & 2) FB(std::isnan(a) || std::isnan(b) ? f_of(0x7fffffff) : std::fmin(a,
          b)) else FB(std::fmin(a, b))
      case FMAX: if (I.f0 & 2) FB(std::isnan(a) || std::isnan(b) ? f_of(0x7fffffff) : std::fmax(a,
          b)) else FB(std::fmax(a, b))
      case FDIV: { u32 *d = R(0), *a = R(1), *b = R(2);
        // f0 bits: 1 ftz, 4 approx/full. div.full: 2 ulp; for |b| > 2^126 div.approx gives 0,
        // div.full scales.
        LANES(float x = f_of(a[l]); float y = f_of(b[l]);
              if (I.f0 & 1) { x = ftz(x); y = ftz(y); }
              float q = x / y;
              if (I.f0 & 8) { float ay = std::fabs(y);
                  if (ay > 0x1p126f && ay <= 0x1p128f
                  && std::isfinite(y)) q = std::isinf(x) ? f_of(0x7fffffff)
                  : std::copysign(0.0f, q); }
              if (I.f0 & 1) q = ftz(q);
              d[l] = u_of(q)) break; }
      case FRCP: { u32 *d = R(0), *a = R(1); LANES(float x = f_of(a[l]); if (I.f0 & 1) x = ftz(x);
          float q = 1.0f / x; if (I.f0 & 1) q = ftz(q);
          d[l] = u_of(q)) break; }
      case FEX2: { u32 *d = R(0), *a = R(1); LANES(float x = f_of(a[l]); if (I.f0 & 1) x = ftz(x);
          float q = (float)std::exp2((double)x); if (I.f0 & 1) q = ftz(q);
          d[l] = u_of(q)) break; }
      case FLG2: { u32 *d = R(0), *a = R(1); LANES(float x = f_of(a[l]); if (I.f0 & 1) x = ftz(x);
          float q = (float)std::log2((double)x); d[l] = u_of(q)) break; }
      case FSQRT: { u32 *d = R(0), *a = R(1); LANES(float x = f_of(a[l]); if (I.f0 & 1) x = ftz(x);
          d[l] = u_of(std::sqrt(x))) break; }
      case FRSQRT: { u32 *d = R(0), *a = R(1); LANES(float x = f_of(a[l]);
          if (I.f0 & 1) x = ftz(x); d[l] = u_of((float)(1.0 / std::sqrt((double)x)))) break; }
      case FTANH: { u32 *d = R(0), *a = R(1);
          LANES(d[l] = u_of((float)std::tanh((double)f_of(a[l])))) break; }
      case CVTF32BF16: U32_(a[l] << 16)
      case CVTF32F16: U32_(u_of(half_to_float((u16)a[l])))
      case CVTBF16F32: U32_(float_to_bf16(f_of(a[l])))
      case CVTF16F32: U32_(float_to_half(f_of(a[l])))
      case CVTBF16X2: B32((u32)float_to_bf16(f_of(a[l])) << 16 | float_to_bf16(f_of(b[l])))
      case CVTF16X2: B32((u32)float_to_half(f_of(a[l])) << 16 | float_to_half(f_of(b[l])))
      case CVTTF32: { u32 *d = R(0), *a = R(1);  // f0: 0 rna, 1 rn
        LANES(u32 v = a[l]; if ((v & 0x7f800000) != 0x7f800000) {
            v = I.f0 ? v + 0xfff + ((v >> 13) & 1) : v + 0x1000; } d[l] = v & 0xffffe000u) break; }
      case CVTS32F32: { u32 *d = R(0), *a = R(1); LANES(double x = f_of(a[l]);
          x = I.f0 == 0 ? std::trunc(x) : I.f0 == 1 ? std::nearbyint(x) : I.f0 == 2
          ? std::floor(x) : std::ceil(x);
          d[l] = std::isnan(x) ? 0 : x >= 2147483647.0 ? 0x7fffffffu : x <= -2147483648.0
              ? 0x80000000u : (u32)(i32)x) break; }
      case CVTU32F32: { u32 *d = R(0), *a = R(1); LANES(double x = f_of(a[l]);
          x = I.f0 == 0 ? std::trunc(x) : I.f0 == 1 ? std::nearbyint(x) : I.f0 == 2
          ? std::floor(x) : std::ceil(x);
          d[l] = !(x > 0) ? 0 : x >= 4294967295.0 ? ~0u : (u32)x) break; }
      case CVTF32S32: U32_(u_of((float)(i32)a[l]))
      case CVTF32U32: U32_(u_of((float)a[l]))
      case CVTF32S64: { u32 *d = R(0); u64 *a = D(1); LANES(d[l] = u_of((float)(i64)a[l])) break; }
      case CVTU64U32: { u64 *d = D(0); u32 *a = R(1); LANES(d[l] = a[l]) break; }
      case CVTS64S32: { u64 *d = D(0); u32 *a = R(1); LANES(d[l] = (u64)(i64)(i32)a[l]) break; }
      case CVTU32U64: { u32 *d = R(0); u64 *a = D(1); LANES(d[l] = (u32)a[l]) break; }
      case CVTU32U16: U32_(a[l] & 0xffff)
      case CVTS32S16: U32_((i32)(int16_t)a[l])
      case CVTU16U32: U32_(a[l] & 0xffff)
      case CVTS32S8: U32_((i32)(int8_t)a[l])
      case CVTU32U8: U32_(a[l] & 0xff)
      case CVTU64U16: { u64 *d = D(0); u32 *a = R(1); LANES(d[l] = a[l] & 0xffff) break; }
      case CVTS64S16: { u64 *d = D(0); u32 *a = R(1); LANES(d[l] = (u64)(i64)(int16_t)a[l]) break; }
      // f0 space (0 global, 1 shared), f1 element bytes, f2: vec | nc << 8 | signed << 9; operands:
      // dst..., base
      case LD: {
        int vec = I.f2 & 255, eb = I.f1;
        u8 buf[32][32];
        if (I.f0 == 0) {
          u64 *a = D(vec);
          LANES(gread(a[l] + (u64)I.imm, eb * vec, buf[l], W, l, I.line, I.f2 >> 8 & 1))
        } else {
          u32 *a = R(vec);
          LANES(sread(a[l] + (u32)I.imm, eb * vec, buf[l], W, l, I.line))
        }
        for (int v = 0; v < vec; v++) {
          if (eb == 8) { u64 *d = D(v); LANES(memcpy(&d[l], buf[l] + 8 * v, 8)) }
          else {
            u32 *d = R(v);
            if (eb == 4) { LANES(memcpy(&d[l], buf[l] + 4 * v, 4)) }
            else if (eb == 2) { LANES(u16 x; memcpy(&x, buf[l] + 2 * v, 2);
                d[l] = (I.f2 >> 9 & 1) ? (u32)(i32)(int16_t)x : x) }
            else { LANES(u8 x = buf[l][v]; d[l] = (I.f2 >> 9 & 1) ? (u32)(i32)(int8_t)x : x) }
          }
        }
        break;
      }
      case ST: {  // operands: base, src...
        int vec = I.f2 & 255, eb = I.f1;
        u8 buf[32][32];
        for (int v = 0; v < vec; v++) {
          if (eb == 8) { u64 *s = D(v + 1); LANES(memcpy(buf[l] + 8 * v, &s[l], 8)) }
          else { u32 *s = R(v + 1); LANES(memcpy(buf[l] + eb * v, &s[l], eb)) }
        }
        // Lanes of one instruction at one address: one of them wins, which is not defined; here the
        // highest.
        u64 at[32];
        if (I.f0 == 0) { u64 *a = D(0); LANES(at[l] = a[l] + (u64)I.imm) }
        else { u32 *a = R(0); LANES(at[l] = (u32)(a[l] + (u32)I.imm)) }
        u32 winners = mask;
        for (int l = 0; l < 31; l++) if (mask >> l & 1)
          for (int k = l + 1; k < 32; k++) if ((mask >> k & 1) && at[k] == at[l]) {
            winners &= ~(1u << l);
            if (memcmp(buf[l], buf[k], eb * vec)) {
              report(INSTR_WAW, I.line, I.line, at[l], W.id, l, 0, I.f0 ? -2 : -1);
            }
          }
        for (int l = 0; l < 32; l++) if (winners >> l & 1) {
          if (I.f0 == 0) gwrite(at[l], eb * vec, buf[l], W, l, I.line);
          else swrite((u32)at[l], eb * vec, buf[l], W, l, I.line);
        }
        break;
      }
      case LDMATRIX: {  // f0 count of matrices, f1 trans; operands: d..., addr
        if (mask != W.live || W.live != ~0u) { fail(I, W, "ldmatrix by part of a warp"); return; }
        int nm = I.f0; u32 *a = R(nm); u16 m[4][8][8];
        for (int j = 0; j < nm; j++) for (int r = 0; r < 8; r++) {
          // the lanes that get the data are who reads
          int l = 8 * j + r; u32 at = a[l] + (u32)I.imm, off;
          if (scheck(at, 16, 16, W, l, I.line,
              off)) for (int c = 0; c < 4; c++)
              sread(at + 4 * c, 4, &m[j][r][2 * c], W, 4 * r + c, I.line);
          else memset(m[j][r], 0xff, 16);
        }
        for (int j = 0; j < nm; j++) { u32 *d = R(j);
          for (int l = 0; l < 32; l++) { int r = l >> 2, c = 2 * (l & 3);
            d[l] = I.f1 ? (u32)m[j][c][r] | (u32)m[j][c + 1][r] << 16
                : (u32)m[j][r][c] | (u32)m[j][r][c + 1] << 16; } }
        break;
      }
      case STMATRIX: {  // operands: addr, s...
        if (mask != W.live || W.live != ~0u) { fail(I, W, "stmatrix by part of a warp"); return; }
        int nm = I.f0; u32 *a = R(0); u16 m[4][8][8];
        for (int j = 0; j < nm; j++) { u32 *s = R(j + 1);
          for (int l = 0; l < 32; l++) { int r = l >> 2, c = 2 * (l & 3);
              u16 lo = (u16)s[l], hi = (u16)(s[l] >> 16);
            if (I.f1) { m[j][c][r] = lo; m[j][c + 1][r] = hi; } else { m[j][r][c] = lo;
                m[j][r][c + 1] = hi; } } }
        for (int j = 0; j < nm; j++) for (int r = 0; r < 8; r++) {
          // the lanes that the data come from are who writes
          int l = 8 * j + r; u32 at = a[l] + (u32)I.imm, off;
          if (scheck(at, 16, 16, W, l, I.line,
              off)) for (int c = 0; c < 4; c++)
              swrite(at + 4 * c, 4, &m[j][r][2 * c], W, 4 * r + c, I.line);
        }
        break;
      }
      case BAR:
        if (mask != W.live || W.live != (W.id * 32 + 32 <= L->threads ? ~0u
            : (1u << (L->threads - W.id * 32)) - 1)) {
          report(DIVERGENT, I.line, 0, 0, W.id, 0, 0, -1);
              fail(I, W, "bar.sync by part of a warp"); return; }
        W.pc++; W.state = BARRIER; W.sub++; return;
      case WARPSYNC: W.sub++; break;
      case SHFL: {  // operands d, p|-1, a, b, c, membermask ; f0 mode 0 up 1 down 2 bfly 3 idx
        u32 *d = R(0), *a = R(2), *b = R(3), *c = R(4), *mm = R(5), src[32], old[32], pred = 0;
        memcpy(old, a, sizeof old);
        int first = __builtin_ctz(mask);
        if ((mm[first] & W.live) != mask) { report(DIVERGENT, I.line, 0, 0, W.id, first, 0, -1);
            fail(I, W, "shfl.sync without all its members"); return; }
        for (int l = 0; l < 32; l++) src[l] = 0;
        for (int l = 0; l < 32; l++) if (mask >> l & 1) {
          u32 bv = b[l] & 31, cv = c[l] & 31, sm = (c[l] >> 8) & 31, mx = (l & sm) | (cv & ~sm),
              mn = l & sm; int j = 0; bool p = false;
          switch (I.f0) { case 0: j = l - (int)bv; p = j >= (int)mx; break; case 1: j = l + bv;
              p = j <= (int)mx; break;
            case 2: j = l ^ bv; p = j <= (int)mx; break; default: j = mn | (bv & ~sm);
                p = j <= (int)mx; }
          if (!p) j = l;
          if (!(mask >> j & 1)) { fail(I, W, "shfl from an inactive lane"); return; }
          src[l] = old[j]; pred |= (u32)p << l;
        }
        LANES(d[l] = src[l])
        if (pool[I.off + 1] >= 0) PR(1) = (PR(1) & ~mask) | (pred & mask);
        break;
      }
      case REDUX: {  // operands d, a, membermask; f0: see op_redux in ptx.py
        u32 *d = R(0), *a = R(1), *mm = R(2);
        int first = __builtin_ctz(mask);
        if ((mm[first] & W.live) != mask) { report(DIVERGENT, I.line, 0, 0, W.id, first, 0, -1);
            fail(I, W, "redux.sync without all its members"); return; }
        u32 v = a[first];
        for (int l = first + 1; l < 32; l++) if (mask >> l & 1) {
          switch (I.f0) {
            case 0: v = (u32)std::min((i32)v, (i32)a[l]); break;
            case 1: v = (u32)std::max((i32)v, (i32)a[l]); break;
            case 2: v = std::min(v, a[l]); break;
            case 3: v = std::max(v, a[l]); break;
            default: v += a[l];
          }
        }
        LANES(d[l] = v)
        break;
      }
      case MMATF32: {  // m16n8k8: d4 a4 b2 c4
        if (mask != ~0u) { report(DIVERGENT, I.line, 0, 0, W.id, 0, 0, -1);
            fail(I, W, "mma by part of a warp"); return; }
        double A[16][8], B[8][8];
        for (int l = 0; l < 32; l++) { int g = l >> 2, t = l & 3;
          A[g][t] = tf32(R(4)[l]); A[g + 8][t] = tf32(R(5)[l]); A[g][t + 4] = tf32(R(6)[l]);
              A[g + 8][t + 4] = tf32(R(7)[l]);
          B[t][g] = tf32(R(8)[l]); B[t + 4][g] = tf32(R(9)[l]); }
        u32 out[4][32];
        for (int l = 0; l < 32; l++) { int g = l >> 2, t = l & 3;
          for (int j = 0; j < 4; j++) { int row = g + (j >> 1) * 8, col = 2 * t + (j & 1);
              double p[8];
            for (int k = 0; k < 8; k++) p[k] = A[row][k] * B[k][col];
            out[j][l] = u_of(tcsum(p, 8, f_of(R(10 + j)[l]))); } }
        for (int j = 0; j < 4; j++) memcpy(R(j), out[j], 128);
        break;
      }
      case MMABF16: case MMAF16: {  // m16n8k16: d4 a4 b2 c4
        if (mask != ~0u) { report(DIVERGENT, I.line, 0, 0, W.id, 0, 0, -1);
            fail(I, W, "mma by part of a warp"); return; }
        auto v = [&](u32 x, int h) -> double { u16 y = (u16)(x >> (16 * h));
            return I.op == MMABF16 ? f_of((u32)y << 16) : half_to_float(y); };
        double A[16][16], B[16][8];
        for (int l = 0; l < 32; l++) { int g = l >> 2, t = l & 3;
          for (int h = 0; h < 2; h++) {
            A[g][2 * t + h] = v(R(4)[l], h); A[g + 8][2 * t + h] = v(R(5)[l], h);
                A[g][2 * t + 8 + h] = v(R(6)[l], h); A[g + 8][2 * t + 8 + h] = v(R(7)[l], h);
            B[2 * t + h][g] = v(R(8)[l], h); B[2 * t + 8 + h][g] = v(R(9)[l], h); } }
        u32 out[4][32];
        for (int l = 0; l < 32; l++) { int g = l >> 2, t = l & 3;
          for (int j = 0; j < 4; j++) { int row = g + (j >> 1) * 8, col = 2 * t + (j & 1);
              double p[16];
            for (int k = 0; k < 16; k++) p[k] = A[row][k] * B[k][col];
            out[j][l] = u_of(tcsum(p, 16, f_of(R(10 + j)[l]))); } }
        for (int j = 0; j < 4; j++) memcpy(R(j), out[j], 128);
        break;
      }
      case MMABF16K8: {  // m16n8k8: d4 a2 b1 c4
        if (mask != ~0u) { report(DIVERGENT, I.line, 0, 0, W.id, 0, 0, -1);
            fail(I, W, "mma by part of a warp"); return; }
        double A[16][8], B[8][8];
        for (int l = 0; l < 32; l++) { int g = l >> 2, t = l & 3;
          for (int h = 0; h < 2; h++) {
            auto v = [&](u32 x) -> double { return f_of((x >> (16 * h)) << 16); };
            A[g][2 * t + h] = v(R(4)[l]); A[g + 8][2 * t + h] = v(R(5)[l]);
            B[2 * t + h][g] = v(R(6)[l]); } }
        u32 out[4][32];
        for (int l = 0; l < 32; l++) { int g = l >> 2, t = l & 3;
          for (int j = 0; j < 4; j++) { int row = g + (j >> 1) * 8, col = 2 * t + (j & 1);
              double p[8];
            for (int k = 0; k < 8; k++) p[k] = A[row][k] * B[k][col];
            out[j][l] = u_of(tcsum(p, 8, f_of(R(7 + j)[l]))); } }
        for (int j = 0; j < 4; j++) memcpy(R(j), out[j], 128);
        break;
      }
      case MOVMATRIX: {  // 8 rows of 8 halves, two in every lane; transposed
        if (mask != ~0u) { report(DIVERGENT, I.line, 0, 0, W.id, 0, 0, -1);
            fail(I, W, "movmatrix by part of a warp"); return; }
        u32 out[32], *a = R(1);
        for (int l = 0; l < 32; l++) { int g = l >> 2, t = l & 3;
          auto v = [&](int row) -> u32 { return (u16)(a[4 * row + g / 2] >> (16 * (g & 1))); };
          out[l] = v(2 * t) | v(2 * t + 1) << 16; }
        memcpy(R(0), out, 128);
        break;
      }
      case WGFENCE: break;
      case WGMMA: {
        if (mask != ~0u) { report(DIVERGENT, I.line, 0, 0, W.id, 0, 0, -1);
            fail(I, W, "wgmma by part of a warp"); return; }
        int g = W.id / 4;
        auto &p = wgpend[g];
        if (p.mask == 0) p.pc = W.pc;
        if (p.pc != W.pc) { fail(I, W, "warps of a group at different products"); return; }
        p.mask |= 1u << (W.id & 3);
        W.pc++;
        if (p.mask == 15) { wgmma(I, g); p.mask = 0;
            for (int k = 0; k < 4; k++) warps[g * 4 + k].state = RUN; if (!error.empty()) return;
            continue; }
        W.state = 3;  // waits for the other warps of its group
        return;
      }
      case WGCOMMIT: for (auto &g : wgs[W.id / 4]) g.stage = 1; break;
      case WGWAIT: {
        auto &v = wgs[W.id / 4];
        if (I.imm != 0) { fail(I, W, "wgmma.wait_group of more than 0"); return; }
        // what a product reads it may have read until now
        for (auto &g : v)
          for (auto &s : g.smem) { Sh &x = ssh[s.first / L->sunit];
            x.r2 = x.r1; x.rpc2 = x.rpc1; x.r1 = tag(cta, epoch, W.sub, W.id, 0); x.rpc1 = g.line; }
        waited[W.id / 4] |= 1u << (W.id & 3);
        if (waited[W.id / 4] == 15) {
          for (auto &g : v) for (auto &s : g.smem) ssh[s.first / L->sunit].flags &= ~2u;
          v.clear(); waited[W.id / 4] = 0;
        }
        break;
      }
      case FENCEPROXY: W.fences++; 
        break;
      case RET: {
        W.live &= ~mask;
        if (!W.live) { W.state = DONE; return; }
        if (!W.diverged && mask != W.active) { W.active &= ~mask; break; }
        // go on with the others
        { i32 m = INT32_MAX; for (int l = 0; l < 32; l++) if (W.live >> l & 1) m =
            std::min(m, W.lanepc[l]);
          u32 a = 0; for (int l = 0; l < 32; l++) if ((W.live >> l & 1) && W.lanepc[l] == m) a |= 1u
              << l;
          W.active = a; W.pc = m; if (a == W.live) W.diverged = false; }
        continue;
      }
      default: fail(I, W, "not implemented"); return;
    }
  next:
    if (!error.empty()) return;
    if (W.diverged) branch(W, 0, 0);
    else W.pc++;
  }
}

bool Machine::run_cta(u64 seed) {
  int nw = (L->threads + 31) / 32;
  warps.resize(nw);
  smem.assign(L->shared, 0xff);
  sinit.assign(L->shared, 0);
  ssh.assign(L->shared / L->sunit + 1, Sh{});
  sfence.assign(L->shared / L->sunit + 1, 0);
  epoch = 0;
  for (auto &p : wgpend) p.mask = 0;
  for (auto &v : wgs) v.clear();
  for (u32 &x : waited) x = 0;
  for (int w = 0; w < nw; w++) start(warps[w], w);
  u64 rng = seed * 0x9E3779B97F4A7C15ULL + cta + 1;
  auto next = [&]() { rng ^= rng << 13; rng ^= rng >> 7; rng ^= rng << 17; return rng; };
  std::vector<int> order(nw);
  for (;;) {
    int ready = 0, waiting = 0, done = 0;
    for (auto &W : warps) { ready += W.state == 0; waiting += W.state == 1; done += W.state == 2; }
    if (done == nw) return true;
    if (!ready) {
      if (waiting == nw) {
        epoch++;
        for (auto &W : warps) W.state = 0;
        continue;
      }
      int grouped = 0;
      for (auto &W : warps) grouped += W.state == 3;
      report(DEADLOCK, 0, 0, 0, 0, 0, 0, -1);
      if (error.empty()) error = waiting
          ? "some warps are at a barrier that others have passed by or ended before" : "deadlock";
      return false;
    }
    for (int i = 0; i < nw; i++) order[i] = i;
    for (int i = nw - 1; i > 0; i--) std::swap(order[i], order[next() % (i + 1)]);
    for (int i : order) {
      if (warps[i].state != 0) continue;
      u64 lim = L->slice ? 1 + next() % L->slice : (u64)-1;
      step(warps[i], lim);
      if (!error.empty()) return false;
    }
  }
}

extern "C" {
int num_ops() { return NUM_OPS; }
const char *op_name(int i) { return NAMES[i]; }
int num_kinds() { return NUM_KINDS; }
const char *kind_name(int i) { return KIND_NAMES[i]; }

int run_launch(const Launch *L, Report *out, int maxrep, u64 *executed, char *error,
    int errlen) {
  Machine M;
  M.L = L;
  M.gsh.resize(L->nregions);
  for (int i = 0; i < L->nregions; i++)
      M.gsh[i].assign(L->regions[i].size / L->regions[i].unit / Machine::PAGE + 2, nullptr);
  for (i32 i = 0; i < L->grid[0] * L->grid[1] * L->grid[2]; i++) {
    M.cta = i;
    if (!M.run_cta(L->seed)) break;
  }
  int n = 0;
  for (auto &kv : M.reports) if (n < maxrep) out[n++] = kv.second;
  *executed = M.executed;
  snprintf(error, errlen, "%s", M.error.c_str());
  return n;
}
}
