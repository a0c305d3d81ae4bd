/* AES-256-GCM over a run of pages in one call (`sealing.PageCipher` says what each method does, and does it in Python).

   The cipher is OpenSSL's, loaded when this module is: the libcrypto of this machine, which Python's own `hashlib` and
   `ssl` mostly have in memory already. Its functions are named here as its manual has them, so that compiling needs no
   headers of it. A page takes five calls of it, and none of Python. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#define KEY_BYTES 32
#define NONCE_BYTES 12
#define TAG_BYTES 16
#define SALT_BYTES 12
#define TRAILER_BYTES (SALT_BYTES + 4)
#define SEAL_BYTES (TAG_BYTES + TRAILER_BYTES)
#define GET_TAG 0x10 /* EVP_CTRL_AEAD_GET_TAG */
#define SET_TAG 0x11 /* EVP_CTRL_AEAD_SET_TAG */

typedef int (*Init)(void *, const void *, void *, const unsigned char *, const unsigned char *);
typedef int (*Update)(void *, unsigned char *, int *, const unsigned char *, int);
typedef int (*Final)(void *, unsigned char *, int *);

static struct {
    void *(*ctx_new)(void);
    void (*ctx_free)(void *);
    int (*ctrl)(void *, int, int, void *);
    const void *(*aes_256_gcm)(void);
    Init encrypt_init, decrypt_init;
    Update encrypt_update, decrypt_update;
    Final encrypt_final, decrypt_final;
} evp;

static const char *const LIBRARIES[] = {"libcrypto.so.3", "libcrypto.so.1.1", NULL};

static int load_evp(void)
{
    static const struct { const char *name; void **into; } wanted[] = {
        {"EVP_CIPHER_CTX_new", (void **)&evp.ctx_new},
        {"EVP_CIPHER_CTX_free", (void **)&evp.ctx_free},
        {"EVP_CIPHER_CTX_ctrl", (void **)&evp.ctrl},
        {"EVP_aes_256_gcm", (void **)&evp.aes_256_gcm},
        {"EVP_EncryptInit_ex", (void **)&evp.encrypt_init},
        {"EVP_EncryptUpdate", (void **)&evp.encrypt_update},
        {"EVP_EncryptFinal_ex", (void **)&evp.encrypt_final},
        {"EVP_DecryptInit_ex", (void **)&evp.decrypt_init},
        {"EVP_DecryptUpdate", (void **)&evp.decrypt_update},
        {"EVP_DecryptFinal_ex", (void **)&evp.decrypt_final},
    };
    void *library = NULL;
    for (int at = 0; library == NULL && LIBRARIES[at] != NULL; at++)
        library = dlopen(LIBRARIES[at], RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        PyErr_Format(PyExc_ImportError, "no libcrypto of OpenSSL 3 or 1.1 here: %s", dlerror());
        return -1;
    }
    for (size_t at = 0; at < sizeof wanted / sizeof *wanted; at++) {
        *wanted[at].into = dlsym(library, wanted[at].name);
        if (*wanted[at].into == NULL) {
            PyErr_Format(PyExc_ImportError, "libcrypto lacks %s", wanted[at].name);
            return -1;
        }
    }
    return 0;
}

static void put32(unsigned char *to, uint32_t value)
{
    for (int at = 0; at < 4; at++) to[at] = (unsigned char)(value >> (24 - 8 * at));
}

static void put64(unsigned char *to, uint64_t value)
{
    put32(to, (uint32_t)(value >> 32));
    put32(to + 4, (uint32_t)value);
}

/* Data that is authenticated with the content. */
static void bind_to(unsigned char *to, uint64_t page, uint64_t version)
{
    put64(to, page);
    put64(to + 8, version);
}

/* ---- one page ---- */

static int seal_page(void *ctx, uint32_t number, const unsigned char *bound, const unsigned char *page, int size,
                     unsigned char *sealed)
{
    unsigned char nonce[NONCE_BYTES] = {0};
    int written;
    put32(nonce + 8, number);
    return evp.encrypt_init(ctx, NULL, NULL, NULL, nonce) == 1 &&
           evp.encrypt_update(ctx, NULL, &written, bound, 16) == 1 &&
           evp.encrypt_update(ctx, sealed, &written, page, size) == 1 && written == size &&
           evp.encrypt_final(ctx, sealed + size, &written) == 1 &&
           evp.ctrl(ctx, GET_TAG, TAG_BYTES, sealed + size) == 1;
}

static int open_page(void *ctx, const unsigned char *number, const unsigned char *bound, const unsigned char *sealed,
                     int size, unsigned char *page)
{
    unsigned char nonce[NONCE_BYTES] = {0}, tag[TAG_BYTES];
    int written;
    memcpy(nonce + 8, number, 4);
    memcpy(tag, sealed + size, TAG_BYTES);
    return evp.decrypt_init(ctx, NULL, NULL, NULL, nonce) == 1 &&
           evp.decrypt_update(ctx, NULL, &written, bound, 16) == 1 &&
           evp.decrypt_update(ctx, page, &written, sealed, size) == 1 && written == size &&
           evp.ctrl(ctx, SET_TAG, TAG_BYTES, tag) == 1 && evp.decrypt_final(ctx, tag, &written) == 1;
}

/* ---- the type ---- */

typedef struct {
    PyObject_HEAD
    void *seals, *opens;
    unsigned char salt[SALT_BYTES];
} PageCipher;

static void cipher_dealloc(PageCipher *self)
{
    if (self->seals != NULL) evp.ctx_free(self->seals);
    if (self->opens != NULL) evp.ctx_free(self->opens);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *cipher_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    const char *key, *salt;
    Py_ssize_t key_bytes, salt_bytes;
    if (named != NULL && PyDict_GET_SIZE(named)) {
        PyErr_SetString(PyExc_TypeError, "PageCipher takes no named arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "y#y#", &key, &key_bytes, &salt, &salt_bytes)) return NULL;
    if (key_bytes != KEY_BYTES || salt_bytes != SALT_BYTES) {
        PyErr_Format(PyExc_ValueError, "expected a key of %d bytes and a salt of %d, not of %zd and %zd", KEY_BYTES,
                     SALT_BYTES, key_bytes, salt_bytes);
        return NULL;
    }
    PageCipher *self = (PageCipher *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    memcpy(self->salt, salt, SALT_BYTES);
    self->seals = evp.ctx_new();
    self->opens = evp.ctx_new();
    const unsigned char *secret = (const unsigned char *)key;
    if (self->seals == NULL || self->opens == NULL ||
        evp.encrypt_init(self->seals, evp.aes_256_gcm(), NULL, secret, NULL) != 1 ||
        evp.decrypt_init(self->opens, evp.aes_256_gcm(), NULL, secret, NULL) != 1) {
        PyErr_SetString(PyExc_RuntimeError, "libcrypto refuses AES-256-GCM");
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int fits(Py_ssize_t page_bytes, const Py_buffer *versions, const Py_buffer *pages, const Py_buffer *sealed)
{
    Py_ssize_t count = versions->len / 8;
    if (page_bytes > 0 && page_bytes <= 1 << 30 && versions->len % 8 == 0 && sealed->len % (page_bytes + SEAL_BYTES) == 0 &&
        sealed->len / (page_bytes + SEAL_BYTES) == count && (pages->buf == NULL || pages->len == count * page_bytes))
        return 1;
    PyErr_Format(PyExc_ValueError, "%zd versions for %zd bytes of pages and %zd sealed bytes", count, pages->len, sealed->len);
    return 0;
}

static uint64_t version_at(const Py_buffer *versions, Py_ssize_t at)
{
    uint64_t version;
    memcpy(&version, (const char *)versions->buf + 8 * at, 8);
    return version;
}

static PyObject *cipher_seal(PageCipher *self, PyObject *args)
{
    unsigned long long first, number;
    Py_buffer versions = {0}, pages = {0}, sealed = {0}, zeros = {0};
    PyObject *done = NULL;
    if (!PyArg_ParseTuple(args, "KKy*z*y*w*", &number, &first, &versions, &pages, &zeros, &sealed)) return NULL;
    Py_ssize_t size = zeros.len, count = versions.len / 8;
    if (!fits(size, &versions, &pages, &sealed)) goto over;
    if (number + (unsigned long long)count > 1ULL << 32) {
        PyErr_SetString(PyExc_OverflowError, "no numbers are left under this salt");
        goto over;
    }
    for (Py_ssize_t at = 0; at < count; at++) {
        unsigned char bound[16], *to = (unsigned char *)sealed.buf + at * (size + SEAL_BYTES);
        const unsigned char *page = pages.buf == NULL ? zeros.buf : (const unsigned char *)pages.buf + at * size;
        bind_to(bound, first + (uint64_t)at, version_at(&versions, at));
        if (!seal_page(self->seals, (uint32_t)(number + (uint64_t)at), bound, page, (int)size, to)) {
            PyErr_SetString(PyExc_RuntimeError, "libcrypto did not encrypt a page");
            goto over;
        }
        memcpy(to + size + TAG_BYTES, self->salt, SALT_BYTES);
        put32(to + size + TAG_BYTES + SALT_BYTES, (uint32_t)(number + (uint64_t)at));
    }
    done = Py_NewRef(Py_None);
over:
    PyBuffer_Release(&versions);
    if (pages.obj != NULL) PyBuffer_Release(&pages);
    PyBuffer_Release(&zeros);
    PyBuffer_Release(&sealed);
    return done;
}

static PyObject *cipher_open(PageCipher *self, PyObject *args)
{
    unsigned long long first;
    Py_ssize_t at;
    Py_buffer versions = {0}, sealed = {0}, into = {0};
    PyObject *wrong, *done = NULL;
    if (!PyArg_ParseTuple(args, "nKy*y*w*O!", &at, &first, &versions, &sealed, &into, &PyList_Type, &wrong)) return NULL;
    Py_ssize_t count = versions.len / 8, size = count ? into.len / count : 1;
    if (!fits(size, &versions, &into, &sealed)) goto over;
    if (at < 0) {
        PyErr_SetString(PyExc_ValueError, "the first position is negative");
        goto over;
    }
    for (; at < count; at++) {
        const unsigned char *from = (const unsigned char *)sealed.buf + at * (size + SEAL_BYTES);
        const unsigned char *trailer = from + size + TAG_BYTES;
        unsigned char bound[16], *page = (unsigned char *)into.buf + at * size;
        if (memcmp(trailer, self->salt, SALT_BYTES) != 0) break;
        bind_to(bound, first + (uint64_t)at, version_at(&versions, at));
        if (!open_page(self->opens, trailer + SALT_BYTES, bound, from, (int)size, page)) {
            memset(page, 0, (size_t)size);
            PyObject *position = PyLong_FromSsize_t(at);
            int added = position == NULL ? -1 : PyList_Append(wrong, position);
            Py_XDECREF(position);
            if (added < 0) goto over;
        }
    }
    done = PyLong_FromSsize_t(at);
over:
    PyBuffer_Release(&versions);
    PyBuffer_Release(&sealed);
    PyBuffer_Release(&into);
    return done;
}

static PyMethodDef methods[] = {
    {"seal", (PyCFunction)cipher_seal, METH_VARARGS, "Seal a run of pages, as sealing.PythonCipher.seal does."},
    {"open", (PyCFunction)cipher_open, METH_VARARGS, "Open a run of pages, as sealing.PythonCipher.open does."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject cipher_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "page_cipher.PageCipher",
    .tp_basicsize = sizeof(PageCipher),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "AES-256-GCM over runs of pages under one key, which one salt made.",
    .tp_new = cipher_new,
    .tp_dealloc = (destructor)cipher_dealloc,
    .tp_methods = methods,
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "page_cipher", .m_doc = "Seals pages, a run in one call.", .m_size = -1,
};

PyMODINIT_FUNC PyInit_page_cipher(void)
{
    if (load_evp() < 0 || PyType_Ready(&cipher_type) < 0) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    if (PyModule_AddObjectRef(module, "PageCipher", (PyObject *)&cipher_type) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
