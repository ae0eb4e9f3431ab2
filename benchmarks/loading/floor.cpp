// The floor of loading a trace: decompress (zlib), then scan once with simdjson into the columns that ddpdoctor makes.
// Not sorted, not numbered by parent, no repair, no streaming: less than any usable loader does.
//
//   g++ -O3 -march=native -std=c++17 floor.cpp -o floor -lsimdjson -lz
//   floor FILE.json[.gz]      prints the number of rows
#include <simdjson.h>
#include <zlib.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

using namespace simdjson;

struct Interner {
    std::unordered_map<std::string, int32_t> ids;
    std::string key;
    int32_t of(std::string_view text) {
        key.assign(text);
        return ids.try_emplace(key, int32_t(ids.size())).first->second;
    }
};

struct Columns {
    std::vector<int64_t> start_ns, duration_ns, correlation, external_id, bytes;
    std::vector<int32_t> name, category, lane, stream, device, shapes;
    Interner names, categories, lanes, texts;
};

static padded_string_view read_whole(const char* path) {
    gzFile file = gzopen(path, "rb");  // passes plain files through
    if (!file) throw std::runtime_error("cannot open the file");
    gzbuffer(file, 1 << 18);
    size_t used = 0, room = 1 << 24;
    char* text = static_cast<char*>(std::malloc(room));
    while (true) {
        if (room < used + (1 << 21) + SIMDJSON_PADDING)  // realloc moves pages, not bytes
            text = static_cast<char*>(std::realloc(text, room *= 2));
        int got = gzread(file, text + used, 1 << 21);
        if (got <= 0) break;
        used += size_t(got);
    }
    gzclose(file);
    return padded_string_view(text, used, room);
}

static int64_t integer(ondemand::value value) {
    int64_t number;
    if (!value.get_int64().get(number)) return number;
    double real;
    return value.get_double().get(real) ? -1 : int64_t(real);
}

static void scan_arguments(ondemand::object arguments, Columns& to, size_t row) {
    for (auto field : arguments) {
        std::string_view key = field.unescaped_key();
        if (key == "correlation") to.correlation[row] = integer(field.value());
        else if (key == "External id") to.external_id[row] = integer(field.value());
        else if (key == "stream") to.stream[row] = int32_t(integer(field.value()));
        else if (key == "device") to.device[row] = int32_t(integer(field.value()));
        else if (key == "bytes") to.bytes[row] = integer(field.value());
        else if (key == "Input Dims") to.shapes[row] = to.texts.of(simdjson::to_json_string(field.value()).value());
    }
}

static void scan_event(ondemand::object event, Columns& to) {
    const size_t row = to.name.size();
    to.start_ns.push_back(0), to.duration_ns.push_back(0), to.correlation.push_back(-1);
    to.external_id.push_back(-1), to.bytes.push_back(-1), to.name.push_back(-1), to.category.push_back(-1);
    to.lane.push_back(-1), to.stream.push_back(-1), to.device.push_back(-1), to.shapes.push_back(-1);
    bool wanted = false;
    std::string lane;
    for (auto field : event) {
        std::string_view key = field.unescaped_key();
        if (key == "ph") {
            std::string_view kind = field.value().get_string();
            wanted = kind == "X" || kind == "i" || kind == "I";
        } else if (key == "ts") to.start_ns[row] = std::llround(double(field.value().get_double()) * 1000);
        else if (key == "dur") to.duration_ns[row] = std::llround(double(field.value().get_double()) * 1000);
        else if (key == "name") to.name[row] = to.names.of(field.value().get_string());
        else if (key == "cat") to.category[row] = to.categories.of(field.value().get_string());
        else if (key == "pid" || key == "tid") lane += std::string_view(field.value().raw_json_token());
        else if (key == "args" && wanted) scan_arguments(field.value().get_object(), to, row);
    }
    to.lane[row] = to.lanes.of(lane);
    if (wanted) return;
    to.start_ns.pop_back(), to.duration_ns.pop_back(), to.correlation.pop_back(), to.external_id.pop_back();
    to.bytes.pop_back(), to.name.pop_back(), to.category.pop_back(), to.lane.pop_back(), to.stream.pop_back();
    to.device.pop_back(), to.shapes.pop_back();
}

int main(int count, char** arguments) try {
    if (count != 2) return std::fprintf(stderr, "usage: floor FILE\n"), 2;
    padded_string_view text = read_whole(arguments[1]);
    ondemand::parser parser;
    ondemand::document document = parser.iterate(text);
    Columns columns;
    for (auto event : document.get_object()["traceEvents"].get_array()) scan_event(event.get_object(), columns);
    std::printf("%zu\n", columns.name.size());
} catch (const std::exception& error) {
    return std::fprintf(stderr, "floor: %s\n", error.what()), 1;
}
